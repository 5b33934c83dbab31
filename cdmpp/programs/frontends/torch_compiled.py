"""Kernels of ``torch.compile`` from the calls of eager PyTorch, by the published rules of its compiler Inductor.

Inductor's scheduler does not run on ``meta`` tensors. The rules here are its main ones (PyTorch 2, ASPLOS 2024, section
4; torch/_inductor/scheduler.py and lowering.py):

- Element-wise calls, small poolings and movements become one kernel with their producer where both have the same number
  of elements. Only inputs and outputs of a kernel move.
- A reduction takes its element-wise producers into its kernel. Normalisations of rows and softmax stay in one kernel;
  batch and group normalisation are a reduction, and an element-wise part that goes on with the next calls.
- Products, convolutions, attention and recurrent networks remain calls of libraries. Convolutions over two axes run in
  channels-last: kernels copy inputs of the program and weights, and its outputs change their layout. Others keep their
  layout. The bias of a convolution joins the next kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cdmpp.programs.frontends.eager_rules import traffic_of
from cdmpp.programs.frontends.kernel_work import ConvolutionWork
from cdmpp.programs.frontends.torch_eager import EagerLaunch, EagerTrace, HostCall, TracedCall, Value
from cdmpp.programs.operators import make_operator

#: Reductions whose result is small, and normalisations that are a reduction and an element-wise part.
_REDUCTIONS = """
    sum mean amax amin max min argmax argmin prod any all var var_mean std std_mean linalg_vector_norm norm logsumexp
    nll_loss_forward mse_loss smooth_l1_loss huber_loss binary_cross_entropy
    """
REDUCTIONS = frozenset(_REDUCTIONS.split())
_NORMALISATIONS = """
    native_batch_norm _native_batch_norm_legit cudnn_batch_norm native_group_norm
    """
NORMALISATIONS = frozenset(_NORMALISATIONS.split())
#: Calls that remain those of libraries or have a kernel of their own.
_LIBRARY = """
    mm addmm bmm baddbmm mv convolution convolution_backward _grouped_mm scaled_dot_product_attention
    scaled_dot_product_attention_backward sort topk cumsum cumprod cummax cummin logcumsumexp index_put index_put_
    embedding_dense_backward _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d linalg_inv_ex nonzero
    _varlen_attn _varlen_attn_backward
    """
LIBRARY = frozenset(_LIBRARY.split())
#: Names of calls that a kernel's name shows.
MAX_NAMES = 6
REMARK = "a fused kernel as relu: its inputs read, its outputs written"


@dataclass
class _Group:
    """Calls that become one kernel."""

    calls: list[TracedCall] = field(default_factory=list)
    #: Elements that the kernel's loop has; after a reduction also those of its result.
    domains: set[int] = field(default_factory=set)
    is_fused: bool = True
    #: Groups that make its inputs.
    needs: set[int] = field(default_factory=set)

    @property
    def name(self) -> str:
        names = list(dict.fromkeys(call.name.strip("_") for call in self.calls))
        return "+".join(names[:MAX_NAMES]) + ("+..." if len(names) > MAX_NAMES else "")


def compiled_trace(trace: EagerTrace) -> EagerTrace:
    """The kernels that ``torch.compile`` makes of a trace; phases are compiled apart."""
    groups: list[_Group] = []
    made: dict[Value, int] = {}
    for call in _with_parts(trace.graph):
        if not call.launches and call.times == 1 and not call.is_part:
            continue
        place = _group_of(call, groups, made)
        if place is None:
            place = len(groups)
            groups.append(_Group(is_fused=_is_fusible(call)))
        group = groups[place]
        group.calls.append(call)
        group.domains |= _domains(call)
        group.needs |= {made[value] for value in call.reads if value in made} - {place}
        made |= dict.fromkeys(call.writes, place)
    used: dict[Value, set[int]] = {}
    for place, group in enumerate(groups):
        for call in group.calls:
            for value in call.reads:
                used.setdefault(value, set()).add(place)
    launches: list[EagerLaunch] = []
    calls = [HostCall("guards", phase) for phase in dict.fromkeys(call.phase for call in trace.graph)]
    for place, group in enumerate(groups):
        first = group.calls[0]
        if not group.is_fused:
            copies = _channels_last_copies(first, trace.launches, made)
            launches += copies
            calls += [HostCall("compiled", first.phase, 1) for _ in copies]
        kernels = _fused(group, place, used, made) if group.is_fused else _library(first, trace.launches, used)
        launches += kernels
        calls.append(HostCall("compiled" if group.is_fused else first.name, first.phase, len(kernels), first.times))
    return replace(trace, launches=tuple(launches), calls=tuple(calls), graph=())


def _is_fusible(call: TracedCall) -> bool:
    return call.phase != "optimizer" and call.name not in LIBRARY and call.times == 1 and not call.is_library


def _with_parts(graph: Sequence[TracedCall]) -> list[TracedCall]:
    """Batch and group normalisations in training as their reduction and their element-wise part."""
    parts: list[TracedCall] = []
    for call in graph:
        if call.name in NORMALISATIONS and len(call.reads) and call.launches:
            statistics = Value(-len(parts) - 1, 0)
            sizes = {**call.sizes, statistics: 8 * call.rows}
            parts.append(replace(call, writes=(statistics,), sizes=sizes, numel=call.rows))
            reads = (*call.reads, statistics)
            parts.append(replace(call, name="normalise", reads=reads, sizes=sizes, is_part=True))
        else:
            parts.append(call)
    return parts


def _domains(call: TracedCall) -> set[int]:
    if call.name in REDUCTIONS or call.name in NORMALISATIONS:
        return {call.read_numel, call.numel}
    return {call.numel}


def _group_of(call: TracedCall, groups: list[_Group], made: dict[Value, int]) -> int | None:
    """The last group that makes an input of the call and that the call can join without a cycle."""
    producers = sorted({made[value] for value in call.reads if value in made}, reverse=True)
    if not producers or not _is_fusible(call):
        return None
    reduces = call.name in REDUCTIONS or call.name in NORMALISATIONS
    domain = call.read_numel if reduces else call.numel
    for place in producers:
        group = groups[place]
        # What needs a finished reduction over everything waits for another kernel.
        finished = domain == max(group.domains) and any(
            c.name in REDUCTIONS or c.name in NORMALISATIONS for c in group.calls
        )
        fits = group.is_fused and group.calls[0].phase == call.phase and domain in group.domains and not finished
        others = [other for other in producers if other != place]
        if fits and not any(_depends(groups, other, place) for other in others):
            return place
    return None


def _depends(groups: list[_Group], place: int, on: int) -> bool:
    """Whether a group needs another one, directly or through others."""
    seen: set[int] = set()
    open_places = [place]
    while open_places:
        current = open_places.pop()
        if current == on:
            return True
        if current not in seen:
            seen.add(current)
            open_places += groups[current].needs
    return False


def _fused(group: _Group, place: int, used: dict[Value, set[int]], made: dict[Value, int]) -> list[EagerLaunch]:
    """One kernel that reads and writes what the group shares with others."""
    moved: dict[Value, float] = {}
    for call in group.calls:
        for value in call.reads:
            if made.get(value) != place:
                moved[value] = max(moved.get(value, 0.0), call.sizes.get(value, 0))
        for value in call.writes:
            if used.get(value, set()) - {place} or value not in used:
                moved[value] = call.sizes.get(value, 0)
    first, last = group.calls[0], max(group.calls, key=lambda call: call.numel)
    spec = make_operator(traffic_of(sum(moved.values()), last.cols))
    return [EagerLaunch(spec, group.name, first.module, first.phase, REMARK)]


def _channels_last_copies(
    call: TracedCall, launches: Sequence[EagerLaunch], made: dict[Value, int]
) -> list[EagerLaunch]:
    """Kernels that copy the input of the program and the weight of a convolution over two axes to channels-last."""
    first = launches[call.start] if call.launches else None
    work = None if first is None else first.work
    if first is None or not isinstance(work, ConvolutionWork) or work.axes != 2 or not work.layout_bytes:
        return []
    # The weight of a single tap has one order only.
    copied = call.reads[:1] if work.taps == 1 else call.reads[:2]
    return [
        EagerLaunch(
            make_operator(traffic_of(2 * call.sizes[value], call.cols)),
            "channels_last",
            call.module,
            call.phase,
            REMARK,
        )
        for value in copied
        if value not in made
    ]


def _library(call: TracedCall, launches: Sequence[EagerLaunch], used: dict[Value, set[int]]) -> list[EagerLaunch]:
    """The call's own kernels. Inside of the program, images of convolutions are channels-last."""
    kernels = []
    for launch in launches[call.start : call.start + call.launches]:
        work = launch.work
        if isinstance(work, ConvolutionWork):
            bias = work.bias and all(value not in used for value in call.writes)
            outer = sum(call.sizes[value] for value in call.writes if value not in used)
            changed = min(outer, work.layout_bytes) if work.axes == 2 else work.layout_bytes
            work = replace(work, bias=bias, layout_bytes=changed)
        kernels.append(replace(launch, work=work))
    return kernels
