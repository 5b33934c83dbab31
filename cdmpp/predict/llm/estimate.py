"""Estimates of language models with any predictor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from os import PathLike
from typing import Any

from cdmpp.devices.loading import load_device, resolve_device
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.predict.interface import Predictor
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.plan import EstimatePlan
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.llm.result import LLMEstimate


def estimate(
    config: LLMConfig | Mapping[str, Any] | str | PathLike[str],
    device: DeviceSpec | Mapping[str, Any] | str,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    batch: int = 1,
    input: int = 1024,
    output: int = 128,
    dtype: str = "bfloat16",
    weights: str | None = None,
    framework: str | None = None,
    cuda_graph: bool = True,
    predictor: Predictor | None = None,
) -> LLMEstimate:
    """Estimate latency, throughput and memory of a batch of requests to a language model.

    Parameters
    ----------
    config : path, mapping or LLMConfig
        A ``config.json`` of Hugging Face.
    device : str, DeviceSpec or mapping
        A known device, the path of a specification (.toml, .json), or a specification.
    tp, pp, ep : int
        Degrees of tensor, pipeline and expert parallelism (:class:`cdmpp.predict.llm.Layout`).
    batch, input, output : int
        Sequences, and tokens of each prompt and each answer.
    dtype : {"bfloat16", "float16", "float32"}
        Type of activations, cache, and weights that are not quantised.
    weights : str, optional
        Type of quantised weights: "float8_e4m3", "int8" and "float4_e2m1" quantise the activations too, "int4" does
        not. Default: as ``quantization_config`` states, else ``dtype``.
    framework : str, optional
        Serving engine; default: vllm.
    cuda_graph : bool
        Whether decode steps are captured graphs.
    predictor : Predictor, optional
        Default: the shipped model, loaded once.

    Returns
    -------
    LLMEstimate

    Raises
    ------
    DataError, UnknownDeviceError
        A file cannot be read, or the framework or device is not known.
    FieldError
        The architecture is not known, a field is missing or impossible, or the layout does not divide the model.
    InfeasibleError
        The model does not fit; the message has the smallest number of devices that hold it.

    Notes
    -----
    ``prefill_s`` is one step over all prompts. Decode step i runs behind ``input + i`` cached tokens; five steps are
    priced and the others interpolated. With ``pp`` stages a batch passes them one after the other, so a step takes
    the sum of all stages and of ``pp - 1`` transfers; several batches in flight raise the throughput beyond
    ``throughput_tokens_per_s``, which is that of one batch.

    Examples
    --------
    >>> estimate("examples/llm/llama-3.1-8b.json", "h100-sxm", batch=8).decode.point       # doctest: +SKIP
    0.0063
    """
    predictor = shipped_predictor() if predictor is None else predictor
    plan = EstimatePlan(
        read_config(config),
        resolved_device(device, predictor),
        tp=tp,
        pp=pp,
        ep=ep,
        batch=batch,
        input=input,
        output=output,
        dtype=dtype,
        weights=weights,
        framework=framework,
        cuda_graph=cuda_graph,
    )
    return plan.estimate(predictor.model_id, predictor.predict_queries(plan.queries))


@cache
def shipped_predictor() -> Predictor:
    """The model that ships with the package, loaded once."""
    from cdmpp.predict.predictor import LatencyPredictor

    return LatencyPredictor.load()


def resolved_device(device: DeviceSpec | Mapping[str, Any] | str, predictor: Predictor) -> DeviceSpec:
    """The specification of a device: a name that the predictor knows, a file, or fields."""
    if isinstance(device, str) and device.lower().endswith((".toml", ".json")):
        return load_device(device)
    # A model may know further devices: those of its records, and one that it was adapted to.
    artifact = getattr(predictor, "artifact", None)
    return resolve_device(device, lookup if artifact is None else artifact.device)
