"""Estimates of language models with any predictor: their queries, and the estimate made of the predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Unpack

import numpy as np

from cdmpp.devices.loading import load_device, resolve_device
from cdmpp.devices.paths import with_network
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.llm.config import ConfigLike, LLMConfig
from cdmpp.llm.engines.profile import Engine, load_engine
from cdmpp.llm.estimate_result import Bounded, EstimatePart, EstimateSettings, LLMEstimate
from cdmpp.llm.layout import WEIGHT_ONLY, Layout, Types
from cdmpp.llm.memory import check_memory
from cdmpp.llm.operators import Decode, Prefill, Step, StepPart, padded_decode, step_operators
from cdmpp.llm.options import MAX_BATCH, MAX_MTP, MAX_TOKENS, BatchOptions, check_whole, with_options
from cdmpp.llm.pricing import PricedStep, StepPricing, combined, place_of, stand_ins, widened
from cdmpp.llm.read import read_config
from cdmpp.model.domain.score import LABELS
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Device, Prediction, Query, check_settings
from cdmpp.programs.collectives import link_remarks
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL

#: Decode steps, and chunks of a prompt, that are priced; the others are interpolated over the length of the cache.
PRICED_POINTS = 5

Array = np.ndarray[Any, np.dtype[np.float64]]


class EstimatePlan:
    """Queries of an estimate, and the estimate made of their predictions.

    Options and errors are those of :func:`cdmpp.llm.estimate`; ``config`` and ``device`` are read already. ``lengths``
    (tokens of each prompt) replaces ``batch`` and ``input``, which are then their number and their mean.
    """

    @with_options(BatchOptions)
    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        *,
        engine: Engine | None = None,
        network: float | str | None = None,
        lengths: Sequence[int] | None = None,
        **options: Unpack[BatchOptions],
    ) -> None:
        if lengths is not None:
            options["batch"], options["input"] = len(lengths), max(1, round(sum(lengths) / max(1, len(lengths))))
        check_whole("batch", options["batch"], MAX_BATCH)
        check_whole("input", options["input"], MAX_TOKENS)
        check_whole("output", options["output"], MAX_TOKENS)
        batch, input, output, mtp = options["batch"], options["input"], options["output"], options["mtp"]
        if config.prompt_only is not None:
            output = 1  # the step of the prompt, whose result is the embedding or the score
        made = tokens_per_step(mtp, options["acceptance"])
        lengths = [input] * batch if lengths is None else lengths
        longest = max(lengths)
        if config.positions and longest + output > config.positions:
            raise FieldError.at(
                "input",
                f"{longest} and {output} output tokens exceed the model's {config.positions} positions",
                hint=f"input + output is at most {config.positions}",
            )
        device = with_network(device, network)
        profile = load_engine(engine, options["framework"])
        assert profile.framework is not None
        check_settings(DEFAULT_PROTOCOL, profile.framework)
        layout = Layout.of(options)
        types = Types.of_options(config, options, device, profile.kv_dtype)
        layout.check(config)
        self.memory = check_memory(config, layout, types, batch, input + output, device.memory_bytes, device.name)
        cuda_graph = options["cuda_graph"]
        settings: dict[str, Any] = {**options, **types.of_answer()}
        settings |= {"output": output, "dp": layout.dp, "framework": profile.framework}
        settings |= {"cuda_graph": cuda_graph and profile.graph_decode, "acceptance": float(options["acceptance"])}
        self.settings = EstimateSettings(device=device.name, engine=profile.name, **settings)
        self._config, self._layout = config, layout
        self._remarks = tuple(_remarks(config, device, types, longest + output, options["kv_dtype"] is None, mtp))

        def parts_of(step: Step) -> list[StepPart]:
            return step_operators(config, layout, step, **types.stated(), device=device)

        def pricing(step: Step) -> StepPricing:
            # The products of later decode steps are those of the first.
            first = isinstance(step, Decode) and step.past_total == sum(lengths)
            parts = padded_decode(step, parts_of) if first else parts_of(step)  # type: ignore[arg-type]
            return StepPricing.of_step(profile, step, layout, parts, cuda_graph)

        budget = None if profile.token_budget is None else profile.token_budget * layout.dp
        chunks = prefill_steps(lengths, budget)
        self._prefill = [pricing(step) for step in chunks]
        self.prefill_runs = np.array(list(chunks.values()))
        #: Decode steps, and those of them that are priced.
        self._steps = np.arange(-(-(output - 1) // made), dtype=np.float64)
        self._points = _points(self._steps)
        self.decode_runs = _weights(self._steps, self._points) if output > 1 else np.zeros(0)
        cached = sum(lengths)
        self._decode = [
            pricing(Decode(batch, past_total=cached + batch * int(step * made), drafted=mtp)) for step in self._points
        ]
        # Decode steps differ in their attention alone: the rest is asked once.
        self._decode = [_shared(self._decode[0], step) for step in self._decode]
        parts = [part for step in (self._prefill[0], *self._decode[:1]) for part in step.parts]
        #: By what profiles know a measured request.
        self.place = place_of(config, device, layout, types, batch=batch, tokens=input + output)
        self._engine, label, reason = profile.at(self.place, *stand_ins(parts))
        self._domain = label, reason
        self._prefill, self._decode = (
            [replace(step, engine=self._engine) for step in steps] for steps in (self._prefill, self._decode)
        )
        positions: dict[Any, int] = {}
        self.queries: list[Query] = []
        self._place: list[int] = []
        for step in (*self._prefill, *self._decode):
            for program, protocol, framework in step.programs:
                key = (id(program), protocol, framework)
                if key not in positions:
                    positions[key] = len(self.queries)
                    self.queries.append(Query(TensorProgram.from_operator(program), device, protocol, framework))
                self._place.append(positions[key])
        self._remarks += tuple(link_remarks((query.program.operator for query in self.queries), device))

    def priced(self, predictions: Sequence[Prediction]) -> tuple[list[PricedStep], list[PricedStep]]:
        """The priced steps of prefill and decode, made of the predictions of :attr:`queries`.

        Raises FieldError where an operator of the model has no prediction.
        """
        remaining = iter([predictions[place] for place in self._place])
        prefill, decode = (
            [step.priced([next(remaining) for _ in step.programs]) for step in steps]
            for steps in (self._prefill, self._decode)
        )
        return prefill, decode

    def estimate(self, model_id: str, predictions: Sequence[Prediction]) -> LLMEstimate:
        """The estimate made of the predictions of :attr:`queries`; errors as of :meth:`priced`."""
        prefill, decode = self.priced(predictions)
        s, residual = self.settings, self._engine.residual
        rows = _parts("prefill", prefill, self.prefill_runs)
        kinds = _summed(prefill, self.prefill_runs)
        prefill_s, decode_s, step_s = combined(kinds, residual), None, None
        if decode:
            durations = np.stack([step.totals() for step in decode])
            decode_kinds = _summed(decode, self.decode_runs)
            decode_s = combined(decode_kinds, residual)
            step_s = np.array([np.median(np.interp(self._steps, self._points, column)) for column in durations.T])
            rows += _parts("decode", decode, self.decode_runs)
            kinds = kinds + decode_kinds
        total_s = combined(kinds, residual)
        first_s = widened(prefill_s, self._engine.first_residual) + self._engine.host.frontend_s
        steps_after = s.output - 1
        return LLMEstimate(
            model_id=model_id,
            settings=s,
            config=self._config,
            gpus=self._layout.gpus,
            prefill=Bounded.of(prefill_s),
            decode=None if step_s is None else Bounded.of(step_s),
            ttft=Bounded.of(first_s),
            total=Bounded.of(total_s),
            tpot=None if decode_s is None else Bounded.of(decode_s / steps_after),
            memory=self.memory,
            parts=rows,
            engine_domain=self._domain,
            remarks=self._remarks,
        )


def tokens_per_step(mtp: int, acceptance: float) -> float:
    """Tokens that a decode step makes of a sequence on average: one, and all drafted ones up to the first wrong one."""
    if type(mtp) is not int or not 0 <= mtp <= MAX_MTP:
        raise FieldError.not_allowed("mtp", mtp, hint=f"0 to {MAX_MTP} drafted tokens")
    if isinstance(acceptance, bool) or not isinstance(acceptance, int | float) or not 0 <= acceptance <= 1:
        raise FieldError.not_allowed("acceptance", acceptance, hint="a share from 0 to 1")
    return float(sum(acceptance**i for i in range(mtp + 1)))


def _remarks(
    config: LLMConfig, device: DeviceSpec, types: Types, tokens: int, usual_cache: bool, mtp: int
) -> Iterator[str]:
    yield from config.remarks
    if config.prompt_only is not None:
        yield f"{config.prompt_only} makes no output tokens: the step of the prompt alone, without output layer"
    if types.weight_only and types.weights not in WEIGHT_ONLY and not config.packed:
        yield f"{device.name} has no units for {types.weights}: weights are read packed, products are in {types.dtype}"
    if types.dtype == "bfloat16" and 2 * device.peak("bfloat16", True) < device.peak("float16", True):
        yield f"{device.name} has no matrix units for bfloat16; float16 is faster"
    if usual_cache and types.kv_dtype not in (None, config.kv_dtype):
        yield f"the cache is in {types.kv_dtype}, as the engine profile says; kv_dtype changes it"
    if mtp:
        yield "layers for the prediction of several tokens: like the last layer, and not part of the memory"
    if config.context is not None and tokens > config.context:
        yield f"input + output of {tokens:,} tokens exceed max_position_embeddings, {config.context:,}"


def _shared(first: StepPricing, step: StepPricing) -> StepPricing:
    """A step with the parts of another one where their programs are equal."""
    parts = [
        priced if priced.program == part.program else part for priced, part in zip(first.parts, step.parts, strict=True)
    ]
    return replace(step, parts=parts)


def _points(steps: Array) -> Array:
    """Steps that are priced: evenly spaced, first and last included."""
    if not len(steps):
        return steps
    return np.unique(np.round(np.linspace(steps[0], steps[-1], PRICED_POINTS)))


def _weights(steps: Array, points: Array) -> Array:
    """Sum over the steps of each point's weight in the linear interpolation; ``(points,)``, adds up to the steps."""
    return np.array([np.interp(steps, points, unit).sum() for unit in np.eye(len(points))])


def prefill_steps(lengths: Sequence[int], budget: int | None) -> dict[Prefill, float]:
    """Steps of a prefill that are priced, and how often each counts.

    Whole prompts share a step up to ``budget`` tokens. A longer prompt is divided into chunks of it; of many chunks
    some are priced and the others interpolated.
    """
    if budget is None or sum(lengths) <= budget:
        return {Prefill(lengths): 1.0}
    steps: dict[Prefill, float] = {}

    def add(step: Prefill, runs: float) -> None:
        steps[step] = steps.get(step, 0.0) + runs

    @cache
    def chunked(length: int) -> list[tuple[Prefill, float]]:
        whole, rest = divmod(length, budget)
        chunks = np.arange(whole, dtype=np.float64)
        points = _points(chunks)
        priced = zip(points, _weights(chunks, points), strict=True)
        steps = [(Prefill([budget], int(chunk) * budget), float(weight)) for chunk, weight in priced]
        return steps + [(Prefill([rest], whole * budget), 1.0)] * (rest > 0)

    together: list[int] = []
    tokens = 0
    for length in lengths:
        if length > budget:
            for step, runs in chunked(length):
                add(step, runs)
            continue
        if tokens + length > budget:
            add(Prefill(together), 1.0)
            together, tokens = [], 0
        together.append(length)
        tokens += length
    if together:
        add(Prefill(together), 1.0)
    return steps


def _summed(steps: Sequence[PricedStep], runs: Array) -> Array:
    """Seconds by kind of all runs, (4, kinds)."""
    return np.asarray(np.einsum("s,sfk->fk", runs, np.stack([step.kinds() for step in steps])))


def _parts(phase: str, steps: Sequence[PricedStep], runs: Array) -> list[EstimatePart]:
    """Parts of a phase, and the time beyond its kernels as another one."""
    sums: dict[tuple[str, str, int], list[Any]] = {}
    for step, often in zip(steps, runs.tolist(), strict=True):
        for part, part_s, prediction in zip(step.parts, step.seconds[0], step.predictions, strict=True):
            place = sums.setdefault((part.name, part.program.operator, step.pricing.parts.index(part)), [0.0, 0.0, []])
            place[0] += often * part.count
            place[1] += often * float(part_s)
            place[2].append(prediction)
    rows = [
        EstimatePart(phase, name, operator, round(count), seconds, worst.domain, worst.domain_reason)
        for (name, operator, _), (count, seconds, predictions) in sums.items()
        for worst in [max(predictions, key=lambda p: LABELS.index(p.domain))]
    ]
    host = float(sum(often * step.host()[0] for step, often in zip(steps, runs, strict=True)))
    if host > 1e-9 * sum(row.seconds for row in rows):
        rows.append(EstimatePart(phase, "host", "host", round(float(runs.sum())), host, None))
    return rows


@with_options(BatchOptions)
def estimate(
    config: ConfigLike,
    device: Device,
    *,
    engine: Engine | None = None,
    network: float | str | None = None,
    predictor: Predictor | None = None,
    **options: Unpack[BatchOptions],
) -> LLMEstimate:
    """Estimate latency, throughput and memory of a batch of requests to a language model.

    Parameters
    ----------
    config : path, mapping or LLMConfig
        A ``config.json`` of Hugging Face.
    device : str, DeviceSpec or mapping
        A known device, the path of a specification (.toml, .json), or a specification.
    tp, pp, ep, dp : int
        Degrees of tensor, pipeline and expert parallelism, and replicas of the attention, by default
        ``max(1, ep // tp)``: ``tp * pp * dp`` devices, ``ep <= tp * dp`` (:class:`cdmpp.llm.Layout`).
    batch, input, output : int
        Sequences of all replicas, and tokens of each prompt and each answer. ``output`` is 1 for models published for
        embeddings, classification or rewards.
    dtype : {"bfloat16", "float16", "float32"}
        Type of activations, and of weights that are not quantised.
    weights : str, optional
        Type of quantised weights: "float8_e4m3", "int8" and "float4_e2m1" quantise the activations too, "int4" does
        not. Default: as ``quantization_config`` states, else ``dtype``.
    kv_dtype : {"float8_e4m3", "int8"}, optional
        Type of the cache. Default: as ``quantization_config`` states, else ``dtype``.
    engine : str, path, mapping or EngineProfile, optional
        What the serving engine adds to its kernels: a shipped profile, a file of :func:`cdmpp.llm.calibrate`, or its
        fields (:class:`cdmpp.llm.engines.EngineProfile`). Default: vllm.
    framework : str, optional
        Alone: the current profile of this engine. With ``engine``: the kernels of a profile that names none.
    cuda_graph : bool
        False: decode steps are no captured graphs, whatever the profile says.
    mtp : int
        Tokens that each decode step drafts by layers for the prediction of several tokens (DeepSeek V3); 0: none.
    acceptance : float
        Share of drafted tokens that is right, where those before are.
    network : float or str, optional
        Bytes per second of one device between nodes, or a name such as "infiniband-ndr" or "roce-200". Default: as
        nodes of the device commonly have it, with a remark where it counts.
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
    ``prefill_s`` is the time of all prompts, in steps of the engine's token budget. Decode step i runs behind
    ``input + i`` cached tokens; five steps are priced and the others interpolated. With ``pp`` stages a batch passes
    them one after the other, so a step takes the sum of all stages and of ``pp - 1`` transfers; several batches in
    flight raise the throughput beyond ``throughput_tokens_per_s``, which is that of one batch.

    Examples
    --------
    >>> estimate("examples/llm/llama-3.1-8b.json", "h100-sxm", batch=8).decode.point       # doctest: +SKIP
    0.0063
    """
    predictor, model, spec = resolved(predictor, config, device)
    plan = EstimatePlan(model, spec, engine=engine, network=network, **options)
    return plan.estimate(predictor.model_id, predictor.predict_queries(plan.queries))


def resolved(
    predictor: Predictor | None, config: ConfigLike, device: Device
) -> tuple[Predictor, LLMConfig, DeviceSpec]:
    """The predictor (None: the shipped one), and model and device as public functions take them."""
    predictor = predictor or shipped_predictor()
    return predictor, read_config(config), resolved_device(device, predictor)


@cache
def shipped_predictor() -> Predictor:
    """The model that ships with the package, loaded once."""
    from cdmpp.predict.predictor import LatencyPredictor

    return LatencyPredictor.load()


def resolved_device(device: Device, predictor: Predictor) -> DeviceSpec:
    """The specification of a device: a name that the predictor knows, a file, or fields."""
    if isinstance(device, str) and device.lower().endswith((".toml", ".json")):
        return load_device(device)
    # A model may know further devices: those of its records, and one that it was adapted to.
    artifact = getattr(predictor, "artifact", None)
    return resolve_device(device, lookup if artifact is None else artifact.device)
