"""Duration and memory of one training step of a language model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields
from typing import Any, Self, Unpack

import numpy as np

from cdmpp.devices.paths import with_network
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.llm import defaults
from cdmpp.llm.config import ConfigLike, LLMConfig
from cdmpp.llm.engines.profile import Engine, EngineProfile, Place, load_training_engine
from cdmpp.llm.estimate_plan import resolved
from cdmpp.llm.memory import model_size
from cdmpp.llm.options import TrainingOptions, with_options
from cdmpp.llm.pricing import KINDS, combined
from cdmpp.llm.training.fitting import smallest_layouts
from cdmpp.llm.training.layout import BLOCK_SCALED, TrainingLayout, training_types
from cdmpp.llm.training.links import BOUNDS, Links
from cdmpp.llm.training.memory import RankParameters, model_flops, stage_layers, training_memory
from cdmpp.llm.training.parts import LayerBuilder, Message, StepItem, merged_items, program_flops
from cdmpp.llm.training.result import TrainingStep
from cdmpp.model.domain.score import Label, TotalDomain
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Device, Prediction, Query
from cdmpp.programs.collectives import link_remarks
from cdmpp.programs.operators import OperatorSpec, operator_family
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import ProgramFramework

Array = np.ndarray[Any, np.dtype[np.float64]]

#: Sustained over nominal bandwidth of the memory for large passes, and its bounds over the point.
_STREAM, _STREAM_BOUNDS = 0.85, (0.9, 1.15)
_PASS_S = 3e-6
#: Power of the SXM board of an architecture in watts; below it the sustained rate falls with the root of the power.
_BOARD_W = {"sm_80": 400.0, "sm_90": 700.0}
#: Largest bound of an operator over its point. Bounds of backward attention outside of its measurements reach 100.
_WIDEST = 3.0
#: Share of hidden communication of gradients and weights that stays exposed: the first or last piece.
_PIECE = 0.05
_GB = 1e9


#: Label of a part's domain, and its reason.
Domain = tuple[Label, str | None]
_NETWORK: Domain = ("near", "the network between nodes has a stated rate")
_MEMORY: Domain = ("near", "a pass over memory has a stated rate")
_STATED = "backward passes are partly stated ratios of forward passes"
#: Standard deviations of a normal distribution from its median to its 90 % quantile.
_TO_BOUND = 1.2816


class _Unit:
    """Seconds of one pass of a part of the model: by kind of kernel, by name, and by group of ranks."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, bool], Array] = {}
        self.kinds: dict[bool, Array] = {False: np.zeros((3, len(KINDS))), True: np.zeros((3, len(KINDS)))}
        self.groups: dict[tuple[str, bool], Array] = {}
        self.launches = {False: 0.0, True: 0.0}
        self.domains: dict[tuple[str, Domain], float] = {}

    def add(self, unit: _Unit, times: float) -> None:
        """Add ``times`` passes of another part."""
        for name, seconds in unit.names.items():
            self.names[name] = self.names.get(name, 0.0) + times * seconds
        for group, seconds in unit.groups.items():
            self.groups[group] = self.groups.get(group, 0.0) + times * seconds
        for backward in (False, True):
            self.kinds[backward] += times * unit.kinds[backward]
            self.launches[backward] += times * unit.launches[backward]
        for part, part_s in unit.domains.items():
            self.domains[part] = self.domains.get(part, 0.0) + times * part_s

    def compute(self, backward: bool) -> float:
        """Seconds of the kernels in one direction."""
        return float(self.kinds[backward][0].sum())

    def message(self, group: str, backward: bool) -> Array:
        """Seconds of the messages of a group: point, lower and upper bound."""
        return self.groups.get((group, backward), np.zeros(3))


class _StagePass:
    """One forward and backward pass of a micro-batch on a stage.

    ``exposed``: messages that computation does not hide, by group, (3,) with bounds. ``recompute_s``: seconds of the
    kernels that the backward pass runs again; ``compute`` includes them. ``host``: seconds that launches take longer.
    ``room``: seconds of the forward (False) and the backward pass in which messages are hidden: kernels run, or the
    device waits for the host.
    """

    def __init__(
        self, unit: _Unit, recompute_s: float, exposed: dict[str, Array], launches_s: dict[bool, float]
    ) -> None:
        self.unit, self.recompute_s, self.exposed = unit, recompute_s, exposed
        self.room = {False: unit.compute(False), True: unit.compute(True) + recompute_s}
        self.compute, self.host = sum(self.room.values()), 0.0
        messages = sum(float(seconds[0]) for seconds in exposed.values())
        # No pass takes longer with fewer tokens: each waits for its own launches.
        for backward, seconds in self.room.items():
            wait = max(0.0, launches_s[backward] - seconds - messages * seconds / max(self.compute, 1e-12))
            self.room[backward], self.host = seconds + wait, self.host + wait
        self.total = self.compute + messages + self.host

    def operators(self) -> dict[str, float]:
        """Seconds of the kernels by name."""
        operators: dict[str, float] = {}
        for (name, _), seconds in self.unit.names.items():
            operators[name] = operators.get(name, 0.0) + float(seconds[0])
        return operators | ({"recomputation": self.recompute_s} if self.recompute_s else {})


class TrainingPlan:
    """Queries of a training step, and the step made of their predictions.

    Parameters and errors are those of :func:`training_step`; ``config`` and ``device`` are read already.
    ``check_memory``: whether a step that does not fit is an error. ``shared``: items of plans that differ in stages,
    batch and sharding only; filled by the first of them. ``exposed_dp_s``: after :meth:`result`, exposed exchanges of
    weights behind forward (False) and of gradients behind backward passes in a step.
    """

    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        layout: TrainingLayout,
        *,
        dtype: str = defaults.DTYPE,
        products: str | None = None,
        ranks_per_node: int | None = None,
        network: float | str | None = None,
        engine: EngineProfile,
        check_memory: bool = True,
        shared: dict[Any, Any] | None = None,
    ) -> None:
        assert engine.training is not None
        layout.check(config)
        self.config, self.device, self.layout, self.engine = config, device, layout, engine
        self.types, self.products = training_types(dtype, products, device), products
        self.links = Links.of(device, ranks_per_node, network)
        self.loop = engine.training
        self._assumed_network = network is None
        #: Items of a mean layer, of the embedding and of the output layer.
        shared = {} if shared is None else shared
        key = (layout.tp, layout.cp, layout.ep, layout.micro_batch)
        if key not in shared:
            shared[key] = self._items()
        self._units: list[list[StepItem]] = shared[key]
        self.parameters = RankParameters.of(config, layout)
        self._layers = stage_layers(config, layout)
        self.memory = training_memory(config, layout, self.types, self.loop, device.memory_bytes)
        if check_memory:
            self.check_memory()
        self._query_index: dict[OperatorSpec, int] = {}
        self.queries: list[Query] = []
        for program in self._programs():
            self._add_query(program)

    @classmethod
    def of(
        cls,
        config: LLMConfig,
        device: DeviceSpec,
        engine: EngineProfile,
        options: Mapping[str, Any],
        *,
        check_memory: bool = True,
    ) -> Self:
        """The plan of options named as those of :func:`training_step`; without ``overlap`` that of the engine."""
        assert engine.training is not None
        names = {field.name for field in fields(TrainingLayout)}
        layout = {name: value for name, value in options.items() if name in names}
        layout["overlap"] = layout.get("overlap") or engine.training.overlap
        others = {name: value for name, value in options.items() if name not in names}
        return cls(config, device, TrainingLayout(**layout), engine=engine, check_memory=check_memory, **others)

    def _items(self) -> list[list[StepItem]]:
        config = self.config
        builder = LayerBuilder(config, self.layout, self.types, self.loop, block_scaled=self.products in BLOCK_SCALED)
        layer: list[StepItem] = []
        for count, mixer in config.first_halves:
            layer += merged_items(builder.attention_half(mixer), count / config.layers)
        for count, half in config.second_halves:
            layer += merged_items(builder.feed_forward_half(half), count / config.layers)
        return [merged_items(items) for items in (layer, builder.first(), builder.last())]

    def check_memory(self) -> None:
        """Raise :class:`InfeasibleError` where the fullest rank exceeds the device."""
        memory, capacity = self.memory, self.device.memory_bytes or float("inf")
        if memory.fits:
            return
        parts = ", ".join(
            f"{name} {getattr(memory, name) / _GB:.1f}" for name in ("weights", "gradients", "optimizer", "activations")
        )

        def fits(layout: TrainingLayout) -> bool:
            memory = training_memory(self.config, layout, self.types, self.loop, self.device.memory_bytes)
            return memory.fits_with_margin

        fitting = smallest_layouts(self.config, self.layout, fits, self.links.domain_ranks)
        hint = "no layout of up to 1024 devices with this batch was found; use a shorter sequence or another batch"
        if fitting:
            hint = "the smallest layouts that fit: " + "; ".join(
                f"{other.gpus} GPUs: {other.named()}" for other in fitting
            )
        raise InfeasibleError(
            f"the step needs {memory.total / _GB:.1f} GB on a {self.device.name} with {self.layout.named()} ({parts}); "
            f"the device has {capacity / _GB:.1f} GB",
            path="gpus",
            hint=hint,
        )

    def _programs(self) -> Iterator[OperatorSpec]:
        for unit in self._units:
            for item in unit:
                if item.program is not None:
                    yield item.program
                elif item.message is not None:
                    program = self._message_program(item.message)
                    if program is not None:
                        yield program
        for operator, size, ranks, span in self._step_messages():
            program = self._collective(operator, size, ranks, span)
            if program is not None:
                yield program

    def _framework(self, program: OperatorSpec) -> ProgramFramework:
        return self.loop.products if program.operator == "linear" else self.engine.frameworks[0]

    def _add_query(self, program: OperatorSpec) -> None:
        if program not in self._query_index:
            self._query_index[program] = len(self.queries)
            query = Query(TensorProgram.from_operator(program), self.device, "kernel", self._framework(program))
            self.queries.append(query)

    def _group(self, group: str) -> tuple[int, int]:
        """Ranks of a group, and the devices over which they are spread."""
        tp, cp, ep = self.layout.tp, self.layout.cp, self.layout.ep
        return {"tp": (tp, tp), "cp": (cp, cp * tp), "ep": (ep, ep)}[group]

    def _collective(self, operator: str, size: float, ranks: int, span: int) -> OperatorSpec | None:
        """The program of a collective inside a domain; over the network of the same ranks on one node, None of one."""
        if self.links.crosses(span):
            ranks = span = min(ranks, self.links.node_ranks)
        return None if ranks == 1 else self.links.program(operator, size, ranks, span)

    def _fullest(self) -> int:
        """The stage with most parameters."""
        return max(range(self.layout.pp), key=lambda s: self._stage(s).total)

    def _stage(self, stage: int) -> Any:
        return self.parameters.stage(self._layers[stage], first=stage == 0, last=stage == self.layout.pp - 1)

    def _step_messages(self) -> Iterator[tuple[str, float, int, int]]:
        """Collectives of gradients and weights, and transfers between stages: operator, bytes, ranks, span."""
        layout = self.layout
        for _, operator, size, ranks, span, _ in self._reductions():
            yield operator, size, ranks, span
        if layout.pp > 1:
            yield "send_recv", self._transfer_bytes(), 2, min(layout.gpus, layout.stage_ranks + 1)

    def _transfer_bytes(self) -> float:
        return self.layout.tokens / self.layout.tp * self.config.hidden * self.types.bytes

    def _reductions(self) -> list[tuple[bool, str, float, int, int, float]]:
        """Whether they hide behind the backward pass, operator, bytes, ranks, span and runs in a step."""
        layout, wide = self.layout, self.loop.gradient_bytes
        messages: list[tuple[bool, str, float, int, int, float]] = []
        fsdp = layout.sharding == "fsdp"
        stage = self._fullest()
        p = self.parameters.layer if fsdp else self._stage(stage)
        runs = float(layout.micro_batches * self._layers[stage]) if fsdp else 1.0
        groups = ((p.dense, layout.dp * layout.cp), (p.experts, layout.expert_copies))
        for count, ranks in groups:
            if ranks == 1 or not count:
                continue
            span = layout.stage_ranks
            if layout.sharding == "none":
                messages.append((True, "all_reduce", count * wide, ranks, span, runs))
                continue
            messages.append((True, "reduce_scatter", count * wide, ranks, span, runs))
            messages.append((False, "all_gather", count * self.types.bytes, ranks, span, runs))
            if fsdp:
                messages.append((True, "all_gather", count * self.types.bytes, ranks, span, runs))
        return messages

    def result(
        self, model_id: str, predictions: Sequence[Prediction], engine: EngineProfile | None = None
    ) -> TrainingStep:
        """The step made of the predictions of :attr:`queries`; FieldError where an operator of the model has none.

        ``engine``: in place of the plan's, with the same frameworks and bytes.
        """
        if engine is not None:
            assert engine.training is not None
            other = copy(self)
            other.engine, other.loop = engine, engine.training
            return other.result(model_id, predictions)
        self._predictions = predictions
        return self._assembled(model_id, [self._unit(items) for items in self._units])

    def layer_pass(self, predictions: Sequence[Prediction], *, backward: bool) -> tuple[Array, dict[str, float]]:
        """Seconds of one pass of a mean layer over a micro-batch, (3,) with bounds, and of its parts.

        The first includes exposed messages. The backward pass has what is computed again.
        """
        self._predictions = predictions
        layer = self._unit(self._units[0])
        kinds, names = layer.kinds[backward].copy(), {}
        for (name, back), value in layer.names.items():
            if back == backward:
                names[name] = float(value[0])
        if backward and (recompute_s := self._recompute_s(layer)):
            kinds += layer.kinds[False] * recompute_s / layer.compute(False)
            names["recomputation"] = recompute_s
        for group in ("tp", "cp", "ep"):
            both = layer.message(group, False) + layer.message(group, True)
            if both[0] > 0:
                exposed = self._exposed(layer, group) * layer.message(group, backward)[0] / both[0]
                kinds[:, KINDS.index("collective")] += exposed
                names[f"{group} communication"] = float(exposed[0])
        return self._interval(kinds), names

    @property
    def place(self) -> Place:
        """Device, products and values by which :class:`~cdmpp.llm.engines.profile.MeasuredSteps` knows a step."""
        names = ("gpus", "tp", "pp", "cp", "ep", "sequence", "tokens")
        values = {name: float(getattr(self.layout, name)) for name in names}
        return self.device.name, self.products or self.types.dtype, values | model_size(self.config)

    def _interval(self, kinds: Array) -> Array:
        """Point, lower and upper bound: of the kernels, or of steps of this domain where those are wider."""
        wide = math.exp(_TO_BOUND * self.engine.at(self.place)[0].residual)
        point, lower, upper = combined(kinds)
        return np.array([point, min(lower, point / wide), max(upper, point * wide)])

    def _recompute_s(self, layer: _Unit) -> float:
        """Seconds of a layer's forward pass that the backward pass computes again."""
        if self.layout.recompute == "full":
            return layer.compute(False)
        if self.layout.recompute == "none":
            return 0.0
        again = self.loop.selective
        return sum(again.get(name, 0.0) * float(v[0]) for (name, back), v in layer.names.items() if not back)

    def _predicted(self, program: OperatorSpec) -> tuple[Array, Domain]:
        """Seconds of a program with bounds, and its domain."""
        prediction = self._predictions[self._query_index[program]]
        if prediction.error is not None:
            raise FieldError(f"{program.text()}: {prediction.error.message}", path="config", hint=prediction.error.hint)
        point = prediction.latency_s or 0.0
        bounds = [point, prediction.lower_s or 0.0, prediction.upper_s or 0.0]
        return np.clip(bounds, point / _WIDEST, point * _WIDEST), (prediction.domain or "out", prediction.domain_reason)

    def _message_s(
        self, operator: str, size: float, ranks: int, span: int, exchange_s: float | None = None
    ) -> tuple[Array, Domain]:
        factor = self.loop.communication_factor
        program = self._collective(operator, size, ranks, span)
        seconds, domain = (np.zeros(3), _NETWORK) if program is None else self._predicted(program)
        if self.links.crosses(span):
            # The network is never faster than the link inside a node for the same ranks.
            over = self.links.network_s(operator, size, ranks, span) if exchange_s is None else exchange_s
            seconds, domain = np.maximum(seconds, over * np.array([1.0, *BOUNDS])), _NETWORK
        return factor * seconds, domain

    def _message_program(self, message: Message) -> OperatorSpec | None:
        """The program of an item's message (:meth:`_collective`)."""
        ranks, span = self._group(message.group)
        return self._collective(message.operator, message.size(ranks), ranks, span)

    def _item_message_s(self, message: Message) -> tuple[Array, Domain]:
        ranks, span = self._group(message.group)
        exchange_s = self.links.exchange_s(message.bytes, message.topk, ranks) if message.topk else None
        return self._message_s(message.operator, message.size(ranks), ranks, span, exchange_s)

    def _traffic_s(self, size: float) -> Array:
        return np.array([1.0, *_STREAM_BOUNDS]) * size / (_STREAM * self.device.mem_bandwidth_bytes_per_s)

    def _sustained_s(self, program: OperatorSpec) -> float:
        """Least seconds of a kernel at the rate that the device sustains; 0 where the profile has none."""
        arch = self.device.arch.rpartition(" ")[2]
        shares = self.loop.sustained if program.operator == "linear" else self.loop.sustained_attention
        if arch not in shares:
            return 0.0
        board_w = _BOARD_W.get(arch, 1.0)
        power = math.sqrt(min(1.0, (self.device.tdp_w or board_w) / board_w))
        return program_flops(program) / (shares[arch] * power * self.device.peak(program.dtype, matrix=True))

    def _factor(self, name: str) -> float:
        if name in ("attention", "window_attention"):
            return self.loop.attention_factor * (1 + self.loop.ring * math.log2(self.layout.cp))
        if not name.startswith("expert"):
            return 1.0
        fused = self.products in BLOCK_SCALED and self.config.gated
        return self.loop.expert_factor * (self.loop.block_scaled_expert_factor if fused else 1.0)

    def _unit(self, items: Iterable[StepItem]) -> _Unit:
        unit = _Unit()
        for item in items:
            if item.message is not None:
                seconds, domain = self._item_message_s(item.message)
                key = (item.message.group, item.backward)
                unit.groups[key] = unit.message(*key) + item.runs * seconds
                part = (f"{item.message.group} communication", domain)
                unit.domains[part] = unit.domains.get(part, 0.0) + item.runs * float(seconds[0])
                continue
            if item.program is not None:
                seconds, domain = self._predicted(item.program)
                seconds = item.runs * np.maximum(seconds, self._sustained_s(item.program))
                kind = operator_family(item.program.operator)
                domain = ("near", _STATED) if item.stated and domain[0] == "in" else domain
            else:
                seconds, domain, kind = self._traffic_s(item.traffic), _MEMORY, "vector"
                seconds = seconds + _PASS_S * min(item.launches, 1) * (item.traffic > 0)
            seconds = self.engine.kernel_factor * self._factor(item.name) * seconds
            unit.kinds[item.backward][:, KINDS.index(kind)] += seconds
            name = (item.name, item.backward)
            unit.names[name] = unit.names.get(name, np.zeros(3)) + seconds
            unit.launches[item.backward] += item.launches
            unit.domains[item.name, domain] = unit.domains.get((item.name, domain), 0.0) + float(seconds[0])
        return unit

    def _stage_pass(self, units: Sequence[_Unit], layers: int, *, is_first: bool, is_last: bool) -> _StagePass:
        layer, first, last = units
        unit = _Unit()
        for part, times in ((layer, layers), (first, is_first), (last, is_last)):
            if times:
                unit.add(part, times)
        again = (self.layout.recompute == "full") * layers * layer.launches[False]
        launches_s = {back: (unit.launches[back] + back * again) * self.engine.host.launch_s for back in (False, True)}
        exposed = {group: self._exposed(unit, group) for group in ("tp", "cp", "ep")}
        return _StagePass(unit, layers * self._recompute_s(layer), exposed, launches_s)

    def _assembled(self, model_id: str, units: Sequence[_Unit]) -> TrainingStep:
        layout, m = self.layout, self.layout.micro_batches
        keys = [(count, s == 0, s == layout.pp - 1) for s, count in enumerate(self._layers)]
        passes = {key: self._stage_pass(units, key[0], is_first=key[1], is_last=key[2]) for key in set(keys)}
        slowest = max(range(layout.pp), key=lambda s: passes[keys[s]].total)
        stage = passes[keys[slowest]]
        mean = sum(passes[key].total for key in keys) / layout.pp
        # A round of fewer micro-batches than stages waits for the last stage.
        waits = layout.pp - 1 + (layout.virtual_pp - 1) * max(0, layout.pp - m)
        bubble = waits / layout.virtual_pp * mean
        self.exposed_dp_s, hidden_dp, dp_bounds = self._data_parallel(stage.room)
        optimizer = self._optimizer_s(self._stage(slowest))
        host_s = m * stage.host + self.engine.host.step_s
        exposed_s = {group: m * float(seconds[0]) for group, seconds in stage.exposed.items()} | {
            "dp": sum(self.exposed_dp_s.values()) + self.loop.contention * hidden_dp,
            "pp": self._stages_s(m),
        }
        kinds = m * (stage.unit.kinds[False] + stage.unit.kinds[True])
        kinds *= (m * stage.compute + bubble) / max(1e-12, float(kinds[0].sum()))
        wide = m * sum(stage.exposed.values()) + dp_bounds
        wide = wide * (sum(exposed_s.values()) / wide[0]) if wide[0] > 0 else np.ones(3) * sum(exposed_s.values())
        kinds[:, KINDS.index("collective")] += wide
        kinds[:, KINDS.index("vector")] += optimizer
        kinds[:, -1] += np.array([host_s, 0.5 * host_s, 2.0 * host_s])
        point, lower, upper = (float(v) for v in self._interval(kinds))
        domain = TotalDomain.of((name, d[0], seconds, d[1]) for (name, d), seconds in stage.unit.domains.items())
        assert domain is not None
        _, label, reason = self.engine.at(self.place)
        flops = model_flops(self.config, layout.sequence) * layout.global_batch * layout.sequence
        peak = self.peak_flops
        return TrainingStep(
            model_id=model_id,
            device=self.device.name,
            engine=self.engine.name,
            config=self.config,
            layout=layout,
            dtype=self.types.dtype,
            products=self.products,
            network_bytes_per_s=self.links.network,
            layers=tuple(self._layers),
            step_s=point,
            lower_s=lower,
            upper_s=upper,
            model_flops_utilization=None if peak is None else flops / (peak * layout.gpus * point),
            memory=self.memory,
            breakdown={
                "compute": {name: m * seconds for name, seconds in stage.operators().items()},
                "exposed": exposed_s,
                "bubble": bubble,
                "optimizer": float(optimizer[0]),
                "host": host_s,
            },
            domain_shares=domain.shares,
            domain=label,
            domain_reason="; ".join(filter(None, (reason, domain.reason))) or _STATED,
            remarks=tuple(self._remarks()),
        )

    def _exposed(self, unit: _Unit, group: str) -> Array:
        """Seconds of messages in one pass that computation does not hide."""
        layout = self.layout
        forward, backward = unit.message(group, False), unit.message(group, True)
        if layout.recompute == "full":
            backward = backward + forward
        both = forward + backward
        if group == "cp":
            # Keys and values of the next rank arrive while attention computes with those at hand.
            attention = sum((v for (name, _), v in unit.names.items() if name.endswith("attention")), np.zeros(3))
            return np.asarray(np.maximum(both / layout.cp, both - attention))
        share = 1.0
        if layout.overlap == "all":
            share = self.loop.exposed_tp if group == "tp" else self.loop.exposed_ep
        return np.asarray(share * both)

    def _data_parallel(self, room: Mapping[bool, float]) -> tuple[dict[bool, float], float, Array]:
        """Exposed seconds behind forward (False) and backward passes, hidden ones, and bounds of all of them."""
        layout, total = self.layout, np.zeros(3)
        by_pass = {False: 0.0, True: 0.0}
        messages = self._reductions()
        for backward, operator, size, ranks, span, runs in messages:
            seconds, _ = self._message_s(operator, size, ranks, span)
            by_pass[backward] += runs * float(seconds[0])
            total = total + runs * seconds
        if layout.overlap == "none" or not messages:
            return by_pass, 0.0, total
        passes = layout.micro_batches if layout.sharding == "fsdp" else 1
        exposed = {back: max(by_pass[back] - passes * room[back], _PIECE * by_pass[back]) for back in room}
        return exposed, float(total[0]) - sum(exposed.values()), total

    def _stages_s(self, m: int) -> float:
        """Exposed seconds of the transfers between stages."""
        layout = self.layout
        if layout.pp == 1:
            return 0.0
        seconds, _ = self._message_s("send_recv", self._transfer_bytes(), 2, min(layout.gpus, layout.stage_ranks + 1))
        filling = 2 * (layout.pp - 1)
        if layout.overlap != "none" and layout.virtual_pp > 1:
            return filling * float(seconds[0])
        return (filling + 2 * m * layout.virtual_pp) * float(seconds[0])

    def _optimizer_s(self, parameters: Any) -> Array:
        """Seconds in which Adam reads and writes its state, the gradient and the weight.

        The norm of the gradients and their scaling pass three times over them. An H100 takes 30.4 and 13.2 bytes at
        this rate for 30 and 12 by this count.
        """
        layout = self.layout
        bytes_each = 4 * self.loop.gradient_bytes + 2 * self.loop.optimizer_bytes + self.types.bytes
        if layout.sharding == "none":
            return self._traffic_s(bytes_each * parameters.total)
        # The sum and the norm of gradients read those of the rank.
        return self._traffic_s(
            bytes_each * (parameters.dense / (layout.dp * layout.cp) + parameters.experts / layout.expert_copies)
        )

    @property
    def peak_flops(self) -> float | None:
        """Peak of the device for the type of the products, in flop/s."""
        names = {"float8_e4m3": "fp8_matrix", "float4_e2m1": "fp4_matrix"}
        names |= {"bfloat16": "bf16_matrix", "float16": "fp16_matrix", "float32": "fp32"}
        name = names[self.types.weights or self.types.dtype]
        value: float | None = getattr(self.device, f"peak_flops_{name}", None)
        # 16-bit types have the same rate; some data sheets print it once.
        return value or (self.device.peak_flops_fp16_matrix if self.types.dtype == "bfloat16" else None)

    def _remarks(self) -> Iterator[str]:
        layout = self.layout
        yield from self.config.remarks
        # The network has a remark of its own.
        device = with_network(self.device, self.links.network)
        yield from link_remarks((query.program.operator for query in self.queries), device)
        crosses = [layout.tp, layout.tp * layout.cp, layout.ep, layout.stage_ranks if layout.dp > 1 else 1, layout.gpus]
        if any(self.links.crosses(span) for span in crosses):
            rate = self.links.network * 8 / _GB
            yield (
                f"network of {rate:.0f} Gbit/s for each GPU{' assumed' if self._assumed_network else ''}; few systems "
                "with several nodes were measured"
            )
        if self.config.experts is not None:
            yield "tokens are spread evenly over the experts, and none is dropped"
        if layout.tp > 1:
            yield "sequence parallelism: norms and residuals are divided by tp"
        if self.types.weights is not None:
            yield "embedding, router, output layer and attention stay in 16 bits"
        if self.config.context is not None and layout.sequence > self.config.context:
            yield f"{layout.sequence:,} tokens exceed max_position_embeddings, {self.config.context:,}"


@with_options(TrainingOptions)
def training_step(
    config: ConfigLike,
    device: Device,
    *,
    network: float | str | None = None,
    engine: Engine = defaults.TRAINING_ENGINE,
    predictor: Predictor | None = None,
    **options: Unpack[TrainingOptions],
) -> TrainingStep:
    """Predict how long one training step of a language model takes on a cluster.

    Parameters
    ----------
    config : path, mapping or LLMConfig
        A ``config.json`` of Hugging Face.
    device : str, DeviceSpec or mapping
    gpus : int
        Devices of the job. ``gpus / (tp * pp * cp)`` copies divide the batch.
    tp, pp, virtual_pp, cp, ep : int
        Ranks that share a layer, stages, parts of the model on a stage, ranks that share a sequence, ranks that share
        the experts.
    sharding : {"none", "optimizer", "fsdp"}
        What the copies divide: nothing, the optimizer's state, or weights and gradients, too.
    micro_batch, global_batch, sequence : int
        Sequences of a pass of one copy, sequences of the step, tokens of a sequence.
    dtype : {"bfloat16", "float16", "float32"}
        Type of weights and activations.
    products : {"float8_e4m3", "mxfp8", "nvfp4"}, optional
        Type of the products of the layers: one scale for a tensor, or one for each 32 or 16 elements.
    recompute : {"none", "selective", "full"}
        Activations that the backward pass computes again: none; attention, norms and activation functions; layers.
    overlap : {"none", "gradients", "all"}, optional
        Communication beside computation. Default: as the engine's profile says.
    ranks_per_node : int, optional
        Devices of a node; default: the device's. An NVLink domain of several nodes is never divided.
    network : float or str, optional
        Bytes per second of one GPU between nodes, or a name such as "roce-200". Default: 400 Gbit/s.
    engine : str, path, mapping or EngineProfile
        The training framework: megatron, torchtitan, llm-foundry, or a calibrated profile.
    predictor : Predictor, optional
        Default: the shipped model, loaded once.

    Returns
    -------
    TrainingStep

    Raises
    ------
    DataError, UnknownDeviceError
        A file cannot be read, or the engine or device is not known.
    FieldError
        The architecture is not known, or the layout divides neither the model nor the batch.
    InfeasibleError
        The step does not fit; the hint has the smallest layouts that do.

    Examples
    --------
    >>> training_step("examples/llm/llama-3.1-8b.json", "h100-sxm", gpus=8, sharding="fsdp", micro_batch=1,
    ...               global_batch=128, sequence=8192).step_s                                  # doctest: +SKIP
    9.1
    """
    predictor, model, spec = resolved(predictor, config, device)
    plan = TrainingPlan.of(model, spec, load_training_engine(engine), {**options, "network": network})
    return plan.result(predictor.model_id, predictor.predict_queries(plan.queries))
