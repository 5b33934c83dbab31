"""A forward-time predictor with the interface of SGLang Simulator's ``InferTimePredictor``.

The simulator is not imported: its model, accelerator, scheduler and batch objects are read by their attributes. Names
and units are those of sgl-project/sglang, ``tools/sglang-simulator/src/sglang_simulator``: ``time_predictor/base.py``,
``simulation/types.py``, ``spec/model/base.py`` and ``spec/accelerator/base.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.integrations.serving_batch import EngineBatch, StepPricer, attribute, whole
from cdmpp.llm import Layout, LLMConfig, read_config
from cdmpp.llm.engines.profile import Engine
from cdmpp.predict.interface import Predictor

#: The simulator's names of accelerators that are not ours.
DEVICES = {
    "a100_sxm": "a100-sxm4-80gb",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "gb200_sxm": "gb200",
    "h20_sxm": "h20",
    "nvidia h20": "h20",
}
#: The simulator's element types -> those of activations, and of weights.
DATA_TYPES: dict[str, tuple[str, str | None]] = {
    "BF16": ("bfloat16", None),
    "FP16": ("float16", None),
    "FP32": ("float32", None),
    "FP8": ("bfloat16", "float8_e4m3"),
    "INT8": ("bfloat16", "int8"),
    "INT4": ("bfloat16", "int4"),
    "FP4": ("bfloat16", "float4_e2m1"),
}
#: The same for the cache.
CACHE_TYPES = {"BF16": "bfloat16", "FP16": "float16", "FP8": "float8_e4m3", "INT8": "int8"}


class CdmppTimePredictor:
    """Predicts the seconds of a forward pass from the operators of its batch.

    Parameters
    ----------
    model : object
        ``hf_config`` (a mapping, or an object with ``to_dict``) or ``model_path``, a folder with ``config.json``.
    hw : object
        ``name`` of the accelerator; see :data:`DEVICES`, else a name of :func:`cdmpp.devices.registry.lookup`.
    config : object
        ``tp_size``, ``pp_size``, ``ep_size``, ``dp_size``, ``data_type``, ``kv_cache_data_type``. With ``dp_size``
        above 1 (data-parallel attention) the batch is that of one rank of the attention.
    device : DeviceSpec or str, optional
        In place of ``hw.name``.
    cuda_graph : bool
        Whether decode steps are captured graphs. Prefill steps wait for their launches where these take longer than
        the kernels.
    engine : str, path, mapping or EngineProfile
        What the engine adds to its kernels.
    framework : str, optional
        Kernels of a profile that names none.
    predictor : Predictor, optional
        Default: the shipped model.

    Raises
    ------
    FieldError
        An attribute is missing, a type is not supported, or the layout does not divide the model.
    """

    def __init__(
        self,
        model: Any,
        hw: Any,
        config: Any,
        *,
        device: DeviceSpec | str | None = None,
        cuda_graph: bool = True,
        engine: Engine = "sglang",
        framework: str | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self.model, self.hw, self.config = model, hw, config
        llm = _llm_config(model)
        dtype, weights = _types(config)
        name = str(attribute(hw, "name", "hw")) if device is None else ""
        cached = _type_name(getattr(config, "kv_cache_data_type", None))
        if cached is not None and cached not in CACHE_TYPES:
            raise _unknown_type("kv_cache_data_type", cached, CACHE_TYPES)
        self._pricer = StepPricer(
            llm,
            _layout(config, llm),
            DEVICES.get(name.lower(), name) if device is None else device,
            dtype=dtype,
            weights=weights,
            kv_dtype=None if cached is None else CACHE_TYPES[cached],
            engine=engine,
            framework=framework,
            cuda_graph=cuda_graph,
            predictor=predictor,
        )
        self.reset_metrics()

    def predict_infer_time(self, batch: Any) -> float:
        """Seconds of a forward pass; 0 for an empty batch.

        Parameters
        ----------
        batch : object
            ``reqs``, each with ``extend_length``, its new tokens, and ``past_kv_length``, its cached tokens. One new
            token behind cached ones is a decoding sequence.
        """
        requests: Any = attribute(batch, "reqs", "batch")
        if not requests:
            return 0.0
        prefills, decodes = [], []
        for request in requests:
            new, past = whole(request, "extend_length", "request"), whole(request, "past_kv_length", "request")
            if new == 1 and past:
                decodes.append(past)
            else:
                prefills.append((new, past))
        step = self._pricer.price(EngineBatch(tuple(sorted(prefills)), tuple(sorted(decodes))))
        seconds = float(step.totals()[0])
        self._calls += 1
        self._predicted_s += seconds
        return seconds

    def get_metrics(self) -> dict[str, float]:
        """Number of forward passes since the last reset, and their seconds."""
        return {"forward_passes": self._calls, "predicted_s": self._predicted_s}

    def reset_metrics(self) -> None:
        """Set the metrics to 0."""
        self._calls, self._predicted_s = 0, 0.0


def _llm_config(model: Any) -> LLMConfig:
    config = getattr(model, "hf_config", None)
    if config is None:
        path = getattr(model, "model_path", None)
        if path is None:
            raise FieldError(
                "model: neither hf_config nor model_path is set", path="model", hint="set hf_config to config.json"
            )
        return read_config(Path(path) / "config.json", "model.hf_config")
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    return read_config(config, "model.hf_config")


def _layout(config: Any, llm: LLMConfig) -> Layout:
    """Layout of the scheduler: ``dp_size`` replicas of the attention share the ``tp_size`` ranks."""
    sizes = {name: whole(config, name, "config") for name in ("tp_size", "pp_size", "ep_size", "dp_size")}
    tp, dp, ep = sizes["tp_size"], sizes["dp_size"], sizes["ep_size"]
    if dp < 1 or tp % dp:
        raise FieldError(f"config.dp_size: {dp} does not divide tp_size={tp}", path="config.dp_size", hint="a divisor")
    if dp == 1:
        return Layout(tp, sizes["pp_size"], ep)
    if llm.experts is None:
        raise FieldError(
            f"config.dp_size: {dp} replicas of the attention of a model without experts",
            path="config.dp_size",
            hint="a model with experts, or dp_size = 1",
        )
    return Layout(tp // dp, sizes["pp_size"], ep, dp)


def _types(config: Any) -> tuple[str, str | None]:
    name = _type_name(attribute(config, "data_type", "config"))
    if name is None:
        return "bfloat16", None
    if name not in DATA_TYPES:
        raise _unknown_type("data_type", name, DATA_TYPES)
    return DATA_TYPES[name]


def _type_name(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value)).removesuffix("_TENSOR")


def _unknown_type(field: str, name: str, known: Any) -> FieldError:
    return FieldError(f"config.{field}: {name!r} is not supported", path=f"config.{field}", hint=", ".join(known))
