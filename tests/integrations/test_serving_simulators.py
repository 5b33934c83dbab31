"""Predictors with the interfaces of Vidur and SGLang Simulator, on objects with the attributes of theirs.

The stand-ins have the fields of microsoft/vidur (``vidur/config/model_config.py``, ``vidur/config/config.py``,
``vidur/entities/request.py``, ``vidur/entities/batch.py``) and sgl-project/sglang (``tools/sglang-simulator``:
``time_predictor/base.py``, ``simulation/types.py``, ``spec/``) that their predictors read.
"""

import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import FieldError, UnknownDeviceError
from cdmpp.integrations.serving_batch import EngineBatch, StepPricer
from cdmpp.integrations.sglang_simulator import CdmppTimePredictor
from cdmpp.integrations.vidur import CdmppExecutionTimePredictor, ExecutionTime, llm_config
from cdmpp.llm import Decode, Layout, Prefill, estimate, read_config, step_operators
from cdmpp.predict.predictor import LatencyPredictor

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm"
LLAMA, DEEPSEEK, GEMMA = (EXAMPLES / f"{name}.json" for name in ("llama-3.1-8b", "deepseek-v3", "gemma-2-9b"))


class NormType(enum.Enum):
    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"


class ActivationType(enum.Enum):
    GELU = "gelu"
    SILU = "silu"


@dataclass
class Llama3ModelConfig:
    """Fields of Vidur's ``Llama3_8BModelConfig``."""

    num_layers: int = 32
    num_q_heads: int = 32
    num_kv_heads: int = 8
    embedding_dim: int = 4096
    mlp_hidden_dim: int = 14336
    vocab_size: int = 128256
    use_gated_mlp: bool = True
    activation: ActivationType = ActivationType.SILU
    norm: NormType = NormType.RMS_NORM
    post_attn_norm: bool = True


@dataclass
class ReplicaConfig:
    """Fields of Vidur's ``ReplicaConfig``."""

    num_pipeline_stages: int = 1
    tensor_parallel_size: int = 1
    device: str = "a100"
    model_config: Any = field(default_factory=Llama3ModelConfig)


@dataclass
class Request:
    """Properties of Vidur's ``Request``."""

    num_processed_tokens: int
    is_prefill_complete: bool


@dataclass
class Batch:
    """Properties of Vidur's ``Batch``."""

    requests: list[Request]
    num_tokens: list[int]


@dataclass
class ScheduleRequest:
    """SGLang Simulator's ``ScheduleRequest``."""

    extend_length: int = 0
    past_kv_length: int = 0


@dataclass
class ScheduleBatch:
    """SGLang Simulator's ``ScheduleBatch``."""

    reqs: list[ScheduleRequest] = field(default_factory=list)


class DataType(enum.Enum):
    BF16 = "BF16"
    FP8 = "FP8"
    FP64 = "FP64"


@dataclass
class SchedulerConfig:
    """Fields of SGLang Simulator's ``SchedulerConfig``."""

    data_type: DataType | None = None
    kv_cache_data_type: DataType | None = None
    tp_size: int = 1
    ep_size: int = 1
    dp_size: int = 1
    pp_size: int = 1


@dataclass
class AcceleratorInfo:
    name: str = "h100_sxm"


@dataclass
class ModelInfo:
    hf_config: Any = None
    model_path: str | None = None


PROMPTS = Batch([Request(0, False), Request(0, False)], [512, 512])
MIXED = Batch([Request(256, False), Request(1000, True), Request(2000, True)], [128, 1, 1])


def vidur(predictor: LatencyPredictor, **replica: Any) -> CdmppExecutionTimePredictor:
    """Made with the keywords with which Vidur's registry makes one."""
    return CdmppExecutionTimePredictor(
        predictor_config=None,
        replica_config=ReplicaConfig(**replica),
        replica_scheduler_config=None,
        metrics_config=None,
        predictor=predictor,
    )


def sglang(predictor: LatencyPredictor, config: Path = LLAMA, **scheduler: Any) -> CdmppTimePredictor:
    model = ModelInfo(json.loads(config.read_text()))
    return CdmppTimePredictor(model, AcceleratorInfo(), SchedulerConfig(**scheduler), predictor=predictor)


def schedule(*requests: tuple[int, int]) -> ScheduleBatch:
    return ScheduleBatch([ScheduleRequest(new, past) for new, past in requests])


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK, GEMMA], ids=lambda path: path.stem)
@pytest.mark.parametrize("step", [Prefill([300, 300]), Decode(3, 700)], ids=["prefill", "decode"])
def test_batch_of_one_phase_has_the_operators_of_a_step(
    predictor: LatencyPredictor, config: Path, step: Prefill | Decode
) -> None:
    layout = Layout(tp=2, ep=8) if config == DEEPSEEK else Layout(tp=2)
    pricer = StepPricer(read_config(config), layout, "h100-sxm", predictor=predictor)
    batch = EngineBatch(((300, 0),) * 2) if isinstance(step, Prefill) else EngineBatch((), (700,) * 3)
    whole = Prefill([300] * 2 * layout.dp) if isinstance(step, Prefill) else Decode(3 * layout.dp, 700)
    want = step_operators(read_config(config), layout, whole)

    def programs(parts: Any) -> list[tuple[str, int]]:
        return sorted((part.program.text(), part.count) for part in parts)

    assert programs(pricer.parts(batch)) == programs(want)


def test_mixed_batch_has_one_projection_of_all_tokens_and_two_attention_kernels(predictor: LatencyPredictor) -> None:
    pricer = StepPricer(read_config(LLAMA), Layout(), "h100-sxm", kv_dtype="float8_e4m3", predictor=predictor)
    parts = {p.name: p.program for p in pricer.parts(EngineBatch(((128, 256),), (1000, 2000)))}
    assert parts["qkv_proj"].m == 130 and parts["lm_head"].m == 3  # type: ignore[attr-defined]
    prefill, decode = parts["attention_prefill"].model_dump(), parts["attention_decode"].model_dump()
    assert (prefill["batch"], prefill["q_len"], prefill["past_len"]) == (1, 128, 256)
    assert (decode["batch"], decode["past_len"], decode["kv_dtype"]) == (2, 1500, "float8_e4m3")


def test_chunks_of_several_lengths_keep_their_query_key_pairs(predictor: LatencyPredictor) -> None:
    pricer = StepPricer(read_config(LLAMA), Layout(), "h100-sxm", predictor=predictor)
    chunks = ((100, 3000), (300, 0), (200, 1000))
    call = next(p.program for p in pricer.parts(EngineBatch(chunks)) if p.name == "attention_prefill").model_dump()
    pairs = call["batch"] * call["q_len"] * (call["past_len"] + (call["q_len"] + 1) / 2)
    assert pairs == pytest.approx(sum(new * (past + (new + 1) / 2) for new, past in chunks), rel=0.01)


def test_cached_latents_are_expanded_with_the_chunk(predictor: LatencyPredictor) -> None:
    pricer = StepPricer(read_config(DEEPSEEK), Layout(tp=8), "h200", predictor=predictor)
    parts = {p.name: p.program.model_dump() for p in pricer.parts(EngineBatch(((64, 448),)))}
    assert parts["kv_b_proj_prefill"]["m"] == 512
    assert parts["attention_prefill"]["past_len"] == 448


@pytest.mark.parametrize("batch", [PROMPTS, MIXED], ids=["prompts", "mixed"])
def test_vidur_times_are_the_layers_of_the_step(predictor: LatencyPredictor, batch: Batch) -> None:
    made = vidur(predictor, tensor_parallel_size=2, num_pipeline_stages=4)
    stages = [made.get_execution_time(batch, stage) for stage in range(4)]
    chunks = [(n, r.num_processed_tokens) for r, n in zip(batch.requests, batch.num_tokens, strict=True)]
    prefills = tuple(sorted(c for c, r in zip(chunks, batch.requests, strict=True) if not r.is_prefill_complete))
    decodes = tuple(sorted(past for (_, past), r in zip(chunks, batch.requests, strict=True) if r.is_prefill_complete))
    pricer = StepPricer(
        llm_config(Llama3ModelConfig()), Layout(2, 4), "a100-sxm4-80gb", dtype="float16", predictor=predictor
    )
    step = pricer.price(EngineBatch(prefills, decodes))
    parts = {part.name: seconds for part, seconds in zip(step.parts, step.seconds[0].tolist(), strict=True)}
    outside = sum(parts[name] for name in ("embedding", "embedding_all_reduce"))
    # The sum over the stages is the whole step, without the embedding.
    assert sum(s.total_time for s in stages) == pytest.approx(sum(parts.values()) - outside)
    assert stages[0].num_layers == 8 and stages[0].model_time == pytest.approx(stages[1].model_time)
    assert stages[0].pipeline_parallel_communication_time > 0 == stages[3].pipeline_parallel_communication_time
    assert stages[0].sampler_e2e_time == 0 < stages[3].sampler_e2e_time
    assert (stages[0].attention_decode_execution_time > 0) == bool(decodes)
    assert stages[0].model_time_ms == pytest.approx(1e3 * stages[0].model_time)


def test_vidur_predictor_makes_the_callers_execution_time(predictor: LatencyPredictor) -> None:
    def twenty(*arguments: float) -> tuple[float, ...]:
        return arguments

    made = CdmppExecutionTimePredictor(
        None, ReplicaConfig(), device="h100-sxm", predictor=predictor, execution_time=twenty
    )
    times = made.get_execution_time(PROMPTS, 0)
    assert len(times) == 20 and times[0] == 32
    assert ExecutionTime(*times).total_time > 0
    # One GPU exchanges nothing.
    assert times[13:15] == (0.0, 0.0)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_sglang_times_are_those_of_the_estimate(predictor: LatencyPredictor, cuda_graph: bool) -> None:
    made = CdmppTimePredictor(
        ModelInfo(json.loads(LLAMA.read_text())),
        AcceleratorInfo(),
        SchedulerConfig(DataType.BF16, tp_size=2),
        cuda_graph=cuda_graph,
        predictor=predictor,
    )
    want = estimate(
        LLAMA,
        "h100-sxm",
        tp=2,
        batch=4,
        input=512,
        output=2,
        framework="sglang",
        cuda_graph=cuda_graph,
        predictor=predictor,
    )
    assert made.predict_infer_time(schedule(*[(512, 0)] * 4)) == pytest.approx(want.prefill.point)
    assert made.predict_infer_time(schedule(*[(1, 512)] * 4)) == pytest.approx(want.decode.point)
    assert made.predict_infer_time(schedule()) == 0
    metrics = made.get_metrics()
    assert metrics["forward_passes"] == 2 and metrics["predicted_s"] == pytest.approx(want.total.point)
    made.reset_metrics()
    assert made.get_metrics() == {"forward_passes": 0, "predicted_s": 0.0}


def test_quantised_weights_and_cache_are_read_from_the_scheduler(predictor: LatencyPredictor) -> None:
    plain, fp8 = sglang(predictor), sglang(predictor, data_type=DataType.FP8, kv_cache_data_type=DataType.FP8)
    batch = schedule(*[(1, 4000)] * 16)
    assert fp8.predict_infer_time(batch) < plain.predict_infer_time(batch)


def test_data_parallel_attention_exchanges_tokens(predictor: LatencyPredictor) -> None:
    made = sglang(predictor, DEEPSEEK, tp_size=8, dp_size=8, ep_size=8, data_type=DataType.FP8)
    assert made.predict_infer_time(schedule((1, 1000), (1, 2000))) > 0
    with pytest.raises(FieldError, match="8 replicas of the attention of a model without experts"):
        sglang(predictor, tp_size=8, dp_size=8)
    with pytest.raises(FieldError, match="3 does not divide tp_size=8"):
        sglang(predictor, tp_size=8, dp_size=3)


def test_model_is_read_from_an_object_or_a_folder(predictor: LatencyPredictor, tmp_path: Path) -> None:
    class PretrainedConfig:
        def to_dict(self) -> dict[str, Any]:
            return dict(json.loads(LLAMA.read_text()))

    (tmp_path / "config.json").write_text(LLAMA.read_text())
    batch = schedule((64, 0))
    seconds = {
        CdmppTimePredictor(model, AcceleratorInfo(), SchedulerConfig(), predictor=predictor).predict_infer_time(batch)
        for model in (ModelInfo(PretrainedConfig()), ModelInfo(model_path=str(tmp_path)))
    }
    assert seconds == {sglang(predictor).predict_infer_time(batch)}
    with pytest.raises(FieldError, match="neither hf_config nor model_path"):
        CdmppTimePredictor(ModelInfo(), AcceleratorInfo(), SchedulerConfig(), predictor=predictor)


def test_wrong_objects_are_named(predictor: LatencyPredictor) -> None:
    with pytest.raises(FieldError, match="replica_config: a NoneType has no attribute model_config"):
        CdmppExecutionTimePredictor(predictor=predictor)
    with pytest.raises(FieldError, match=r"replica_config\.model_config\.num_layers: 'many' is not a whole number"):
        vidur(predictor, model_config=Llama3ModelConfig(num_layers="many"))  # type: ignore[arg-type]
    with pytest.raises(FieldError, match="5 does not divide 32 layers"):
        vidur(predictor, num_pipeline_stages=5)
    with pytest.raises(FieldError, match="tp: 3 does not divide the model"):
        vidur(predictor, tensor_parallel_size=3)
    with pytest.raises(FieldError, match="pipeline_stage: 1 of 1 stages"):
        vidur(predictor).get_execution_time(PROMPTS, 1)
    with pytest.raises(FieldError, match=r"batch\.num_tokens: 1 entries for 2 requests"):
        vidur(predictor).get_execution_time(Batch(PROMPTS.requests, [512]), 0)
    with pytest.raises(FieldError, match="it has no sequences"):
        vidur(predictor).get_execution_time(Batch([], []), 0)
    with pytest.raises(FieldError, match="has no new token"):
        sglang(predictor).predict_infer_time(schedule((0, 10)))
    with pytest.raises(FieldError, match=r"config\.data_type: 'FP64' is not supported"):
        sglang(predictor, data_type=DataType.FP64)
    with pytest.raises(UnknownDeviceError):
        vidur(predictor, device="abacus")
