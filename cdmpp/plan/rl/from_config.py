"""A request of the RL planner from a model's configuration, a number of devices and measured response lengths.

Layouts of both stages are on whole nodes: training by size of its pool, and generation instances.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from typing import Any, Literal

from cdmpp.devices.paths import RANKS_PER_NODE, host_link, link_of_device, network_of_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, FieldError, InfeasibleError
from cdmpp.llm import read_config
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.engines.profile import load_engine
from cdmpp.llm.estimate_plan import resolved_device, shipped_predictor
from cdmpp.llm.instances import InstanceLayout, instance_layouts
from cdmpp.llm.memory import parameter_count
from cdmpp.llm.read import config_fields
from cdmpp.llm.training.sizes import TrainingQuestion, training_sizes
from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.base.solve import predict_prices, read_request, solve_request
from cdmpp.plan.rl.measured import DEGREES, STAGES
from cdmpp.plan.rl.problem import make_problem, stages_s
from cdmpp.plan.rl.schema import RlRequest
from cdmpp.plan.rl.size_search import shortest_step_s
from cdmpp.predict.interface import Predictor
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.utils.files import MAX_CONFIG_BYTES, parse_csv, parse_file, parse_table

MAX_LENGTH_BYTES, MAX_LENGTHS = 64 * MAX_CONFIG_BYTES, 10**7
#: Columns of a table of measured steps beside the degrees of training: seconds and sizes.
SECONDS = (*(f"{name}_s" for name in STAGES), "step_s")
SIZES = ("generation_units", "training_units", "generation_gpus", "training_gpus", "generation_tp")
#: Draws, and seconds, with which the layouts of an instance are compared.
DRAWS, COMPARE_S = 2, 5.0


def read_lengths(path: str | PathLike[str]) -> list[int]:
    """Response lengths of a CSV file: its first column, with or without a header.

    Raises DataError: the file cannot be read, has no lengths, or a cell is none.
    """
    rows = parse_file(
        path, lambda text: parse_csv(text, MAX_LENGTHS), "CSV", "give a CSV file", max_bytes=MAX_LENGTH_BYTES
    )
    cells = [row[0] for row in rows if row[0]]
    if cells and not cells[0].isdecimal():
        cells = cells[1:]
    wrong = next((cell for cell in cells if not re.fullmatch(r"\d{1,9}", cell) or int(cell) < 1), None)
    if not cells or wrong is not None:
        problem = "no lengths" if wrong is None else f"{wrong[:80]!r} is no length"
        raise DataError(f"{fspath(path)}: {problem}", hint="one number of tokens on each line")
    return [int(cell) for cell in cells]


def read_measured(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Measured steps of a CSV file with a header: seconds by stage or of the step, sizes and degrees.

    Raises DataError: the file cannot be read, has an unknown column or a wrong number, or no step.
    """
    rows = parse_file(path, lambda text: parse_table(text, 1000), "CSV", "give a CSV file", max_bytes=MAX_LENGTH_BYTES)
    allowed = (*SECONDS, *SIZES, *DEGREES)
    if unknown := [name for row in rows for name in row if name not in allowed]:
        raise DataError(
            f"{fspath(path)}: column {unknown[0][:80]!r} is not known", hint="columns: " + ", ".join(allowed)
        )
    if not rows:
        raise DataError(f"{fspath(path)}: no measured steps", hint="a header, and a line for each step")
    try:
        return [{n: float(c) if n in SECONDS else int(c) for n, c in row.items() if c} for row in rows]
    except ValueError as error:
        raise DataError(f"{fspath(path)}: {error}", hint="give seconds and whole numbers") from None


@dataclass(frozen=True)
class _Job:
    """Model, devices and sizes of a job; ``mean`` and ``longest`` are tokens of a sample with its prompt."""

    fields: Mapping[str, Any]  # the model's configuration as in its file
    model: LLMConfig
    device: DeviceSpec
    # Devices in all, and of a node.
    gpus: int
    node: int
    lengths: Sequence[int]
    samples: int
    mini_batch: int
    prompt: int
    engine: str | None
    predictor: Predictor
    training: TrainingQuestion
    options: Mapping[str, Any]

    @property
    def mean(self) -> int:
        return self.prompt + round(sum(self.lengths) / len(self.lengths))

    @property
    def longest(self) -> int:
        return self.prompt + max(self.lengths)

    def instances(self, tp: int | None, weights: str | None) -> list[InstanceLayout]:
        return instance_layouts(self.model, self.device, self.gpus, self.node, self.mean, self.longest, tp, weights)

    def request(self, instance: InstanceLayout, only: int | None = None) -> dict[str, Any]:
        """The request with a layout of the generation instances. ``only``: devices that train; default: all numbers."""
        tp, units = instance.tp, self.gpus // instance.tp
        placement = 1 if self.gpus <= self.node else max(1, self.node // tp)
        # All numbers of devices that any instance layout may have, so that equal questions are asked.
        step = 1 if self.gpus <= self.node else self.node
        counts = range(step, self.gpus + 1, step) if only is None else [only]
        rows = training_sizes(self.training, counts, host_link(self.device).bandwidth_bytes_per_s, self.predictor)
        sizes = [{"units": count // tp, **row} for count, row in sorted(rows.items()) if count % (placement * tp) == 0]
        if not sizes:
            raise InfeasibleError(
                f"no training layout of up to {self.gpus} {self.device.name} holds the model with updates of "
                f"{self.mini_batch} samples",
                path="gpus",
                hint="use more devices, or another mini-batch",
            )
        stated = {name: value for name, value in (("engine", self.engine), ("weights", instance.weights)) if value}
        llm = {"config": self.fields, "tp": tp, "ep": instance.ep, **stated}
        link = link_of_device(self.device) if self.gpus <= self.node else network_of_device(self.device)
        max_batch = max(2, min(load_engine(self.engine, None).max_sequences, self.samples))
        # As in veRL and NeMo-RL, each device that generates receives every tensor whole, and keeps its part.
        weight_bytes = float(2 * parameter_count(self.model))
        network_s = network_of_device(self.device).bandwidth_bytes_per_s
        return {
            "lengths": {"samples": list(self.lengths)},
            "samples_per_step": self.samples,
            "prompt_tokens": self.prompt,
            "decode": {
                "batch": sorted({1, *(2**i for i in range(3, max_batch.bit_length())), max_batch}),
                "from_past": self.prompt,
                "llm": {**llm, "past_len": 2 * self.mean - self.prompt},
            },
            "prefill": self._prefill_s(llm),
            "training": {"sizes": sizes, "mini_batch": self.mini_batch},
            "kv": {
                "bytes_per_token": instance.token_bytes,
                "memory_bytes": instance.cache_bytes,
                "max_batch": max_batch,
            },
            "pools": [{"name": self.device.name, "units": units, "device": self.device.name, "placement": placement}],
            "weights": {
                "transfer": {
                    "bytes": weight_bytes,
                    "same_site": {"bandwidth_bytes_per_s": network_s, "latency_s": 1e-5},
                },
                "shared_s": weight_bytes / link.bandwidth_bytes_per_s,
            },
            "measured": [],
            **self.options,
        }

    def _prefill_s(self, llm: Mapping[str, Any]) -> float:
        """Seconds of a prompt, where prompts fill the token budget of a step."""
        if not self.prompt:
            return 0.0
        budget = load_engine(self.engine, None).token_budget or self.prompt
        count = max(1, budget // self.prompt)
        form = {"batch": [count], "device": self.device.name, "llm": {**llm, "phase": "prefill", "input": self.prompt}}
        curve = read_request(BatchCurve, form)
        priced = curve.with_prices(iter(predict_prices(curve.price_requests("prefill"), self.predictor)))
        return float(priced.points()[1][0].latency_s) / count

    def best(self, instances: Sequence[InstanceLayout]) -> dict[str, Any]:
        """The request whose plan has the shortest step, of those with each layout of an instance."""
        requests: list[tuple[float, dict[str, Any]]] = []
        failed: InfeasibleError | None = None
        for instance in instances:
            try:
                request = self.request(instance)
                if len(instances) == 1:
                    return request
                quick = read_request(RlRequest, {**request, "draws": DRAWS})
                problem = make_problem(quick.with_prices(predict_prices(quick.price_requests(), self.predictor)))
                requests.append((shortest_step_s(problem, SearchControl(COMPARE_S)), request))
            except InfeasibleError as error:
                failed = error
        if not requests:
            assert failed is not None
            raise failed
        nearest = [request for _, request in sorted(requests, key=lambda item: item[0])[:2]]
        plans = [solve_request(read_request(RlRequest, request), self.predictor).step_s for request in nearest]
        return nearest[plans.index(min(plans))]

    def measured(self, row: Mapping[str, Any], path: str, weights: str | None) -> dict[str, Any]:
        """A measured step with the predicted seconds of its own layout."""
        given = tuple((name, row[name]) for name in DEGREES if name in row)
        generating = row.get("generation_gpus", self.gpus)
        training = row.get("training_gpus")
        job = replace(self, training=replace(self.training, given=given or self.training.given), options={})
        try:
            instance = job.instances(row.get("generation_tp"), weights)[0]
            request = job.request(instance, only=training or generating)
        except (FieldError, InfeasibleError) as error:
            raise type(error)(f"{path}: {error.message}", path=path, hint=error.hint) from None
        step = {name: row[name] for name in SECONDS if name in row}
        step["generation_units"] = generating // instance.tp
        if training is not None:
            step["training_units"] = training // instance.tp
        typed = read_request(RlRequest, {**request, "draws": DRAWS, "measured": [step]})
        priced = typed.with_prices(predict_prices(typed.price_requests(), self.predictor))
        assert priced.measured is not None
        stages = stages_s(make_problem(priced.model_copy(update={"measured": None})), priced.measured[0], path)
        return {**step, "predicted": {f"{name}_s": float(s) for name, s in zip(STAGES, stages, strict=True)}}


def request_from_config(
    config: Mapping[str, Any] | str | PathLike[str],
    device: str,
    *,
    gpus: int,
    lengths: Sequence[int],
    samples: int = 512,
    mini_batch: int | None = None,
    prompt: int = 512,
    forwards: int = 2,
    products: str | None = None,
    weights: str | None = None,
    engine: str | None = None,
    train_engine: str = "megatron",
    generation_tp: int | None = None,
    degrees: Mapping[str, int] | None = None,
    layout: Literal["any", "separate", "shared"] = "any",
    staleness: int | None = None,
    budget_s: float = 10.0,
    measured: Sequence[Mapping[str, Any]] = (),
    predictor: Predictor | None = None,
) -> dict[str, Any]:
    """A request of ``cdmpp plan rl`` whose costs are predicted for one language model on one kind of device.

    Training has the fastest layout for each number of devices that fits their memory, as
    :func:`cdmpp.llm.training_step` counts it. The layout of a generation instance is that whose plan has the shortest
    step. On several nodes both stages have whole nodes.

    Parameters
    ----------
    lengths : sequence of int
        Response lengths in tokens.
    samples, mini_batch, prompt : int
        Samples of a step and of an update (default: all samples), and tokens of each prompt.
    forwards : int
        Passes of reference and old policy over each sample, models of the same size in the layout of training.
    products, weights : str, optional
        Type of the training's products, and of the weights of generation.
    engine, train_engine : str
        Profiles of generation and training.
    generation_tp, degrees : int, and mapping of str to int, optional
        Tensor-parallel ranks of an instance, and ``tp``, ``pp``, ``virtual_pp``, ``cp``, ``ep`` and ``micro_batch`` of
        training; default: searched.
    layout, staleness, budget_s
        As in the request.
    measured : sequence of mapping
        Measured steps (:func:`read_measured`).

    Raises
    ------
    FieldError, InfeasibleError
        No instance or no training layout fits the devices.
    """
    predictor = shipped_predictor() if predictor is None else predictor
    fields = dict(config) if isinstance(config, Mapping) else config_fields(config)
    model, spec = read_config(fields), resolved_device(device, predictor)
    node = spec.ranks_per_node or RANKS_PER_NODE
    if gpus > node and gpus % node:
        raise FieldError.at("gpus", f"{gpus} do not fill nodes of {node}", hint=f"use a multiple of {node}")
    mini_batch = samples if mini_batch is None else mini_batch
    given = tuple(sorted((degrees or {}).items()))
    question = TrainingQuestion(
        model, spec, train_engine, products, mini_batch, tuple(prompt + n for n in lengths), forwards, given
    )
    options: dict[str, Any] = {"layout": layout, "budget_s": budget_s}
    if staleness is not None:
        options["staleness"] = staleness
    job = _Job(
        fields, model, spec, gpus, node, lengths, samples, mini_batch, prompt, engine, predictor, question, options
    )
    request = job.best(job.instances(generation_tp, weights))
    steps = [job.measured(row, f"measured.{index}", weights) for index, row in enumerate(measured)]
    return {**request, "measured": steps}
