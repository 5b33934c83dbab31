"""An execution-time predictor with the interface of Vidur's ``BaseExecutionTimePredictor``.

Vidur is not imported: its configuration, batch and request objects are read by their attributes. Names and units are
those of microsoft/vidur, ``vidur/execution_time_predictor/base_execution_time_predictor.py``,
``vidur/entities/execution_time.py``, ``vidur/entities/batch.py`` and ``vidur/config/model_config.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.integrations.serving_batch import EngineBatch, StepPricer, attribute, per_request, whole
from cdmpp.llm import Layout, LLMConfig
from cdmpp.predict.interface import Predictor

#: Vidur's names of devices, which stand for boards of 80 GB in a DGX.
DEVICES = {"a100": "a100-sxm4-80gb", "h100": "h100-sxm"}

#: Parts of the output layer.
_SAMPLER = ("final_norm", "lm_head", "logits_all_gather", "logits_soft_cap", "sampling")


@dataclass(frozen=True)
class ExecutionTime:
    """Times of a batch in one pipeline stage, in milliseconds, with the arguments of ``vidur.entities.ExecutionTime``.

    Attributes
    ----------
    model_time, total_time : float
        Seconds of the layers of the stage, and the same with scheduling, sampling and other overheads.
    """

    num_layers_per_pipeline_stage: int
    attention_rope_execution_time: float
    attention_kv_cache_save_execution_time: float
    attention_decode_execution_time: float
    attention_prefill_execution_time: float
    attention_layer_pre_proj_execution_time: float
    attention_layer_post_proj_execution_time: float
    mlp_layer_up_proj_execution_time: float
    mlp_layer_down_proj_execution_time: float
    mlp_layer_act_execution_time: float
    attn_norm_time: float
    mlp_norm_time: float
    add_time: float
    tensor_parallel_communication_time: float
    pipeline_parallel_communication_time: float
    schedule_time: float
    sampler_e2e_time: float
    prepare_inputs_e2e_time: float
    process_model_outputs_time: float
    ray_comm_time: float

    @property
    def num_layers(self) -> int:
        """Layers of the stage."""
        return self.num_layers_per_pipeline_stage

    @property
    def model_time(self) -> float:
        """Seconds of the layers and of the transfer to the next stage."""
        layer_ms = (
            self.attention_rope_execution_time
            + self.attention_kv_cache_save_execution_time
            + self.attention_decode_execution_time
            + self.attention_prefill_execution_time
            + self.attention_layer_pre_proj_execution_time
            + self.attention_layer_post_proj_execution_time
            + self.mlp_layer_up_proj_execution_time
            + self.mlp_layer_down_proj_execution_time
            + self.mlp_layer_act_execution_time
            + self.attn_norm_time
            + self.mlp_norm_time
            + self.add_time
            + 2 * self.tensor_parallel_communication_time
        )
        return (layer_ms * self.num_layers + self.pipeline_parallel_communication_time) * 1e-3

    @property
    def model_time_ms(self) -> float:
        """:attr:`model_time` in milliseconds."""
        return self.model_time * 1e3

    @property
    def total_time(self) -> float:
        """Seconds with all overheads."""
        overhead_ms = (
            self.schedule_time
            + self.sampler_e2e_time
            + self.prepare_inputs_e2e_time
            + self.process_model_outputs_time
            + self.ray_comm_time
        )
        return self.model_time + overhead_ms * 1e-3


def llm_config(model_config: Any) -> LLMConfig:
    """Dimensions of one of Vidur's model configurations. Raises FieldError: the configuration lacks a dimension."""
    owner = "replica_config.model_config"
    sizes = {
        name: whole(model_config, name, owner)
        for name in ("num_layers", "num_q_heads", "num_kv_heads", "embedding_dim", "mlp_hidden_dim", "vocab_size")
    }
    return LLMConfig(
        model_type=type(model_config).__name__,
        layers=sizes["num_layers"],
        hidden=sizes["embedding_dim"],
        vocab=sizes["vocab_size"],
        heads=sizes["num_q_heads"],
        kv_heads=sizes["num_kv_heads"],
        head_dim=sizes["embedding_dim"] // sizes["num_q_heads"],
        intermediate=sizes["mlp_hidden_dim"],
        gated=bool(attribute(model_config, "use_gated_mlp", owner)),
        activation=_enum_name(attribute(model_config, "activation", owner)),
        norm="layernorm" if "layer" in _enum_name(attribute(model_config, "norm", owner)) else "rmsnorm",
    )


def _enum_name(value: object) -> str:
    return str(getattr(value, "name", value)).lower()


def _parts_of_layer(*names: str) -> Callable[[CdmppExecutionTimePredictor, Any], float]:
    """Method that adds up parts of a layer, in milliseconds; 0 without a part."""
    return lambda predictor, batch: predictor._layer_ms(batch, names) if names else 0.0


class CdmppExecutionTimePredictor:
    """Predicts the execution time of batches in place of Vidur's profiled regressors.

    Parameters
    ----------
    predictor_config, replica_scheduler_config, metrics_config : object
        Accepted as Vidur passes them, and not read: nothing is profiled, fitted or cached in files.
    replica_config : object
        Attributes ``tensor_parallel_size``, ``num_pipeline_stages``, ``device`` and ``model_config``
        (:func:`llm_config`).
    device : DeviceSpec or str, optional
        Default: ``replica_config.device``; "a100" and "h100" are the boards of :data:`DEVICES`.
    dtype, weights : str, str or None
        Types of activations and of quantised weights.
    framework : str
        Framework whose kernels are meant.
    cuda_graph : bool
        Whether batches without a prefill are captured graphs.
    predictor : Predictor, optional
        Default: the shipped model.
    execution_time : callable
        Makes the result of :meth:`get_execution_time` from Vidur's twenty arguments. Inside Vidur pass
        ``vidur.entities.ExecutionTime``.

    Raises
    ------
    FieldError
        An attribute is missing, or the layout does not divide the model.

    Notes
    -----
    As in Vidur, all times are of one layer, in milliseconds, and embedding is left out. ``sampler_e2e_time`` is the
    output layer with the choice of the next token, in the last stage only. Schedule, input and output preparation and
    Ray take 0, as with Vidur's ``skip_cpu_overhead_modeling``.
    """

    def __init__(
        self,
        predictor_config: Any = None,
        replica_config: Any = None,
        replica_scheduler_config: Any = None,
        metrics_config: Any = None,
        *,
        device: DeviceSpec | str | None = None,
        dtype: str = "float16",
        weights: str | None = None,
        framework: str = "vllm",
        cuda_graph: bool = True,
        predictor: Predictor | None = None,
        execution_time: Callable[..., Any] = ExecutionTime,
    ) -> None:
        owner = "replica_config"
        config = llm_config(attribute(replica_config, "model_config", owner))
        self._post_attn_norm = bool(
            attribute(attribute(replica_config, "model_config", owner), "post_attn_norm", owner)
        )
        layout = Layout(
            whole(replica_config, "tensor_parallel_size", owner), whole(replica_config, "num_pipeline_stages", owner)
        )
        if config.layers % layout.pp:
            raise FieldError(
                f"replica_config.num_pipeline_stages: {layout.pp} does not divide {config.layers} layers",
                path="replica_config.num_pipeline_stages",
                hint="Vidur's stages have equally many layers",
            )
        if device is None:
            name = str(attribute(replica_config, "device", owner)).lower()
            device = DEVICES.get(name, name)
        self._pricer = StepPricer(
            config,
            layout,
            device,
            dtype=dtype,
            weights=weights,
            framework=framework,
            cuda_graph=cuda_graph,
            predictor=predictor,
        )
        self._num_layers_per_pipeline_stage = config.layers // layout.pp
        self._execution_time = execution_time

    def get_execution_time(self, batch: Any, pipeline_stage: int) -> Any:
        """Times of a batch in a pipeline stage.

        Parameters
        ----------
        batch : object
            Attributes ``requests`` (each with ``is_prefill_complete`` and ``num_processed_tokens``) and
            ``num_tokens``, the new tokens of each request.
        pipeline_stage : int
            Index of the stage.
        """
        layout = self._pricer.layout
        if not 0 <= pipeline_stage < layout.pp:
            raise FieldError(
                f"pipeline_stage: {pipeline_stage} of {layout.pp} stages",
                path="pipeline_stage",
                hint=f"0 to {layout.pp - 1}",
            )
        last = pipeline_stage == layout.pp - 1
        return self._execution_time(
            self._num_layers_per_pipeline_stage,
            self._get_attention_rope_execution_time(batch),
            self._get_attention_kv_cache_save_execution_time(batch),
            self._get_attention_decode_execution_time(batch),
            self._get_attention_prefill_execution_time(batch),
            self._get_attention_layer_pre_proj_execution_time(batch),
            self._get_attention_layer_post_proj_execution_time(batch),
            self._get_mlp_layer_up_proj_execution_time(batch),
            self._get_mlp_layer_down_proj_execution_time(batch),
            self._get_mlp_layer_act_execution_time(batch),
            self._get_attn_norm_layer_act_execution_time(batch),
            self._get_mlp_norm_layer_act_execution_time(batch),
            self._get_add_layer_act_execution_time(batch),
            self._get_tensor_parallel_communication_time(batch),
            0.0 if last else self._get_pipeline_parallel_communication_time(batch),
            self._get_schedule_time(batch),
            self._get_sampler_e2e_time(batch) if last else 0.0,
            self._get_prepare_inputs_e2e_time(batch),
            self._get_process_model_outputs_time(batch),
            self._get_ray_comm_time(batch),
        )

    # Vidur's abstract methods: milliseconds of one layer, of the parts that are named.
    _get_attention_layer_pre_proj_execution_time = _parts_of_layer("qkv_proj", "qk_norm")
    _get_attention_layer_post_proj_execution_time = _parts_of_layer("o_proj")
    _get_attention_rope_execution_time = _parts_of_layer("rotary")
    _get_attention_kv_cache_save_execution_time = _parts_of_layer("kv_cache_save")
    _get_attention_decode_execution_time = _parts_of_layer("attention_decode", "window_attention_decode")
    _get_attention_prefill_execution_time = _parts_of_layer("attention_prefill", "window_attention_prefill")
    _get_mlp_layer_up_proj_execution_time = _parts_of_layer("gate_up_proj", "up_proj")
    _get_mlp_layer_down_proj_execution_time = _parts_of_layer("down_proj")
    _get_mlp_layer_act_execution_time = _parts_of_layer("activation")
    _get_attn_norm_layer_act_execution_time = _parts_of_layer("attention_norm")
    # Residuals are added in the norms, and the overheads of the host are left out.
    _get_add_layer_act_execution_time = _parts_of_layer()
    _get_schedule_time = _parts_of_layer()
    _get_prepare_inputs_e2e_time = _parts_of_layer()
    _get_process_model_outputs_time = _parts_of_layer()
    _get_ray_comm_time = _parts_of_layer()

    def _get_mlp_norm_layer_act_execution_time(self, batch: Any) -> float:
        return self._layer_ms(batch, ("mlp_norm",)) if self._post_attn_norm else 0.0

    def _get_tensor_parallel_communication_time(self, batch: Any) -> float:
        # Vidur counts it twice in a layer.
        return self._layer_ms(batch, ("attention_all_reduce", "mlp_all_reduce")) / 2

    def _get_pipeline_parallel_communication_time(self, batch: Any) -> float:
        return 1e3 * self._seconds(batch, ("stage_transfer",)) / max(1, self._pricer.layout.pp - 1)

    def _get_sampler_e2e_time(self, batch: Any) -> float:
        return 1e3 * self._seconds(batch, _SAMPLER)

    def _layer_ms(self, batch: Any, names: Iterable[str]) -> float:
        return 1e3 * self._seconds(batch, names) / self._pricer.config.layers

    def _seconds(self, batch: Any, names: Iterable[str]) -> float:
        wanted = set(names)
        step = self._pricer.price(engine_batch(batch))
        return float(sum(s for part, s in zip(step.parts, step.seconds[0], strict=True) if part.name in wanted))


def engine_batch(batch: Any) -> EngineBatch:
    """Prefill chunks and decoding sequences of one of Vidur's batches."""
    requests: Any = attribute(batch, "requests", "batch")
    tokens: Any = attribute(batch, "num_tokens", "batch")
    prefills, decodes = [], []
    for new, request in per_request(tokens, requests):
        past = whole(request, "num_processed_tokens", "request")
        if attribute(request, "is_prefill_complete", "request"):
            decodes.append(past)
        else:
            prefills.append((int(new), past))
    return EngineBatch(tuple(sorted(prefills)), tuple(sorted(decodes)))
