"""torch module -> the library kernels that eager PyTorch launches for it, forward and backward.

The module runs once on torch's ``meta`` device, which has shapes and no data: nothing is computed, nothing is
allocated, and a network that fits no GPU can be listed. Every call that PyTorch dispatches below autograd is
mapped by :mod:`cdmpp.programs.frontends.eager_rules`, so the backward pass is what autograd really runs and not a
multiple of the forward pass.

On ``meta`` PyTorch composes attention of products and a softmax. On a GPU it launches one fused kernel
(FlashAttention or its memory-efficient form). The backward kernel has 2.5 times the arithmetic of the forward kernel at
somewhat lower rates (FlashAttention-2, arXiv:2307.08691, sections 3.1 and 4.1). No operator describes it: it is listed
as three forward kernels.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.programs.frontends.eager_rules import (
    BACKWARD_KERNELS,
    AtenCall,
    Launches,
    attention_kernel,
    dtype_of,
    further_outcome,
    size_bytes,
)
from cdmpp.programs.frontends.graph import NoRuleError, Unsupported
from cdmpp.programs.frontends.kernel_work import KernelWork, Work
from cdmpp.programs.frontends.torch_meta import (
    ExpectedValues,
    differentiated,
    meta_inputs,
    meta_module,
    module_name,
    not_traceable,
)
from cdmpp.programs.operators import OperatorSpec, make_operator

Phase = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class EagerLaunch:
    """One kernel."""

    spec: OperatorSpec
    call: str  # the ATen call that launches it
    # Qualified name of the innermost module that made the call; of a backward call, of the forward call that it
    # differentiates. Empty for the root.
    module: str
    phase: Phase
    remark: str = ""  # why the operator is not the call's own, where it is not
    work: Work | None = None  # bounds besides those of the operator

    @property
    def runs(self) -> int:
        """How often the operator runs: each step of a recurrent network is one."""
        return round(self.work.steps) if isinstance(self.work, KernelWork) else 1


@dataclass(frozen=True)
class HostCall:
    """A call on the host line: of an ATen operator, or of a module (``name`` is then "module")."""

    name: str
    phase: Phase
    launches: int = 0  # how many of :attr:`EagerTrace.launches` it adds
    times: int = 1  # how often the host does its work: a recurrent network launches each step


class Value(NamedTuple):
    """A tensor's memory, and how often it was written."""

    storage: int
    version: int


@dataclass(frozen=True)
class TracedCall:
    """A call with its data flow."""

    name: str
    phase: Phase
    module: str
    # First of its kernels in :attr:`EagerTrace.launches`, and their number.
    start: int
    launches: int
    reads: tuple[Value, ...] = ()
    writes: tuple[Value, ...] = ()
    sizes: Mapping[Value, float] = field(default_factory=dict)  # bytes of each
    # Elements of the result and of the largest input, statistics of a normalisation, last axis of the result.
    numel: int = 0
    read_numel: int = 0
    rows: int = 1
    cols: int = 1
    times: int = 1  # as in :class:`HostCall`
    is_library: bool = False  # not a call that PyTorch dispatches on ``meta``: attention, recurrent networks
    is_part: bool = False  # a part of a call, without launches of its own in eager PyTorch


@dataclass(frozen=True)
class EagerTrace:
    """The launches of one run of a module, in order."""

    launches: tuple[EagerLaunch, ...]
    calls: tuple[HostCall, ...] = ()  # in order, with those that launch nothing
    # Calls that launch something for which there is no operator, by name and number.
    # Every call that launches something is in ``launches`` or here.
    unsupported: tuple[Unsupported, ...] = ()
    # Parameters in the order in which the backward pass finishes their gradients, by qualified name, and how many of
    # ``launches`` come before. A parameter that several modules share has its first name.
    gradients: tuple[tuple[str, int], ...] = ()
    incomplete: frozenset[Phase] = frozenset()  # phases with calls in ``unsupported``
    graph: tuple[TracedCall, ...] = ()  # the calls with their data flow, where it was asked for
    assumptions: tuple[str, ...] = ()  # what was assumed of values that the module reads

    def of(self, phase: Phase) -> list[EagerLaunch]:
        """The launches of one pass."""
        return [launch for launch in self.launches if launch.phase == phase]

    def counts(self, phase: Phase | None = None) -> dict[OperatorSpec, int]:
        """Operator -> number of launches, in the order of first occurrence."""
        total: Counter[OperatorSpec] = Counter()
        for launch in self.launches:
            if phase in (None, launch.phase):
                total[launch.spec] += launch.runs
        return dict(total)


def eager_trace(
    module: nn.Module,
    inputs: Sequence[Any],
    *,
    keywords: Mapping[str, Any] | None = None,
    backward: bool = False,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    train: bool | None = None,
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None,
    with_graph: bool = False,
) -> EagerTrace:
    """List the kernels of one forward pass, and of the backward pass if asked for.

    Kernels are those of a GPU: dropout is one kernel, and attention that is called by ``scaled_dot_product_attention``
    is one fused kernel forward and three backward. The module is traced as a copy on ``meta`` and is not changed. Of
    ``inputs`` only shapes and types of tensors count, also in lists and dictionaries.

    ``backward``: also run backward from a gradient of the output; parameters that require a gradient get one. Needs a
    module that returns tensors, alone or in tuples, lists, dictionaries or data classes. If a dictionary or object has
    a ``loss``, the backward pass starts there. ``accumulate``: gradients are there from an earlier pass: each new one
    is added to the old. ``dtype``: of the floating-point parameters, buffers and inputs, as after ``module.to(dtype)``.
    ``autocast``: as under ``torch.autocast``: products in this type, normalisations and softmax in float32, casts
    between. ``train``: ``train()`` or ``eval()`` before the run; default: the mode of the module. ``optimizer`` makes
    an optimizer of the parameters that the backward pass gave gradients; one step of it is traced. ``with_graph``: take
    down the data flow of the calls too.

    Raises InvalidProgramError: the module contains itself, does not accept the inputs, or does not run without data: it
    looks at values, or makes tensors on a device of its own.
    """
    module = meta_module(module, dtype, train)
    arguments, keyword_arguments = meta_inputs((list(inputs), dict(keywords or {})), dtype)
    recorder = _Recorder(module, with_graph, autocast is not None)
    try:
        with ExitStack() as stack:
            stack.enter_context(recorder.watching())
            stack.enter_context(torch.set_grad_enabled(backward))
            stack.enter_context(torch.device("meta"))
            stack.enter_context(_without_fast_path())
            stack.enter_context(_AsOnGpu(recorder, autocast))
            stack.enter_context(recorder)
            result = module(*arguments, **keyword_arguments)
            if backward:
                for parameter in module.parameters() if accumulate else ():
                    if parameter.requires_grad:
                        parameter.grad = torch.empty_like(parameter)
                _run_backward(result, recorder)
    except CdmppError:
        raise
    except Exception as error:
        raise not_traceable(module, recorder.running, error) from None
    if optimizer is not None:
        _run_optimizer(module, optimizer, recorder)
    return recorder.trace()


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """``nn.MultiheadAttention`` calls the attention that it was asked for.

    Its fast path is one call for the host and has the same kernels on a GPU. On ``meta`` it loses the fused attention.
    ``torch.autocast("meta")``, which transformers 4 turns off, is refused by PyTorch: that of "cpu" stands for it.
    """
    before, autocast = torch.backends.mha.get_fastpath_enabled(), torch.autocast.__init__

    def of_known_device(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    torch.backends.mha.set_fastpath_enabled(False)
    torch.autocast.__init__ = of_known_device  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = autocast  # type: ignore[method-assign]
        torch.backends.mha.set_fastpath_enabled(before)


def _run_backward(result: Any, recorder: _Recorder) -> None:
    outputs = differentiated(result)
    if not outputs:
        raise InvalidProgramError(
            "backward: no output of the module requires a gradient", hint="leave requires_grad of parameters on"
        )
    recorder.phase = "backward"
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


def _run_optimizer(
    module: nn.Module, make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer], recorder: _Recorder
) -> None:
    """One step; the step before it makes the optimizer's state and is not recorded."""
    recorder.phase = "optimizer"
    trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
    if not trained:
        raise InvalidProgramError(
            f"{type(module).__name__}: no parameter has a gradient to update", hint="leave the optimizer out"
        )
    try:
        optimizer = make(iter(trained))
        with recorder:
            with recorder.quiet():
                optimizer.step()
            optimizer.step()
    except Exception as error:
        raise not_traceable(module, "the optimizer", error) from None


#: PyTorch's tags of calls that stream their tensors; old versions lack the second.
_ONE_PASS = frozenset(tag for name in ("pointwise", "reduction") if (tag := getattr(torch.Tag, name, None)) is not None)


#: Products whose tensors have one type: on a GPU PyTorch refuses others, on ``meta`` it does not.
_OF_ONE_TYPE = frozenset(("mm", "addmm", "bmm", "baddbmm", "convolution"))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every call below autograd."""

    def __init__(self, module: nn.Module, with_graph: bool = False, autocast: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of_one_type: frozenset[str] = frozenset() if autocast else _OF_ONE_TYPE
        self._graph: list[TracedCall] | None = [] if with_graph else None
        self._versions: Counter[int] = Counter()
        # Held so that no storage has the address of an earlier one.
        self._held: list[Tensor] = []
        self.phase: Phase = "forward"
        self._module = module
        self._launches: list[EagerLaunch] = []
        self._calls: list[HostCall] = []
        self._assumed: Counter[str] = Counter()
        self._unsupported: Counter[tuple[str, str]] = Counter()
        self._incomplete: set[Phase] = set()
        self._stack: list[str] = [""]
        # Autograd numbers the operations of the forward pass: (number, module) wherever the module changes.
        self._numbers: list[int] = [0]
        self._modules: list[str] = [""]
        self._gradients: list[tuple[str, int]] = []
        self._quiet = False
        self.values = ExpectedValues(lambda text: self._assumed.update([text]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].is_meta and args[0].dtype != torch.bool and not self._quiet:
            return self.assume("item", args[0])
        if name in ("index", "index_put", "index_put_"):
            with self:
                args = (args[0], self.values.without_masks(args[1]), *args[2:])
        out = self.values.result(name, args)
        out = func(*args, **(kwargs or {})) if out is None else out
        if not self._quiet:
            call = AtenCall(name, args, kwargs or {}, out)
            self.values.note(call)
            before = len(self._launches)
            if call.name in self._of_one_type and len(types := dict.fromkeys(map(dtype_of, call.tensors))) > 1:
                raise InvalidProgramError(
                    f"{self.running or type(self._module).__name__}: {call.name} of tensors of different types: "
                    + ", ".join(types),
                    hint="cast the inputs, or pass dtype or autocast",
                )
            self.add(call, one_pass=not _ONE_PASS.isdisjoint(func.tags))
            if self._graph is not None and len(self._launches) > before:
                self.connect(call.name, before, call.tensors, call.results)
        return out

    def add(self, call: AtenCall, *, one_pass: bool) -> None:
        """Take down what a call launches; ``one_pass``: as in :func:`further_outcome`."""
        try:
            self.launch(call.name, further_outcome(call, one_pass=one_pass))
        except NoRuleError as error:
            self.missing(call.name, str(error))
        except CdmppError as error:
            self.missing(call.name, error.message)

    def launch(self, call: str, operators: Launches, *, times: int = 1) -> int:
        """Take down the kernels of a call, which the host makes ``times`` times; the number of kernels before."""
        start = len(self._launches)
        specs = [make_operator(fields) for fields in operators.launches]
        where = self._where()
        self._launches += [
            EagerLaunch(spec, call, where, self.phase, operators.remark, work)
            for spec, work in zip_longest(specs, operators.works)
        ]
        self._calls.append(HostCall(operators.host or call, self.phase, len(specs), times))
        return start

    def connect(self, name: str, start: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **more: Any) -> None:
        """Take down the data flow of the call whose kernels begin at ``start``."""
        if self._graph is None:
            return
        self._held += [*inputs, *outputs]
        sizes: dict[Value, float] = {}

        def values(tensors: Sequence[Tensor]) -> tuple[Value, ...]:
            programs = []
            for tensor in tensors:
                storage = tensor.untyped_storage()._cdata
                value = Value(storage, self._versions[storage])
                sizes[value] = max(sizes.get(value, 0.0), size_bytes(tensor))
                programs.append(value)
            return tuple(dict.fromkeys(programs))

        reads = values(inputs)
        for storage in {tensor.untyped_storage()._cdata for tensor in outputs}:
            self._versions[storage] += 1
        writes = values(outputs)
        result = max(outputs, key=lambda tensor: tensor.numel(), default=None)
        shape = result.shape if result is not None else ()
        call = TracedCall(
            name,
            self.phase,
            self._where(),
            start,
            len(self._launches) - start,
            reads,
            writes,
            sizes,
            numel=0 if result is None else result.numel(),
            read_numel=max((tensor.numel() for tensor in inputs), default=0),
            rows=shape[1] if len(shape) > 1 else 1,
            cols=shape[-1] if shape else 1,
        )
        self._graph.append(replace(call, **more))

    def missing(self, call: str, reason: str) -> None:
        """Take down a kernel that has no operator."""
        self._calls.append(HostCall(call, self.phase))
        self._unsupported[call, reason] += 1
        self._incomplete.add(self.phase)

    def assume(self, call: str, tensor: Tensor) -> int | float:
        """The value 1 for one that is not known; the host waits for the device."""
        self._assumed[f"Tensor.{call}() is 1"] += 1
        self._calls.append(HostCall("_local_scalar_dense", self.phase))
        return 1.0 if tensor.is_floating_point() and call != "__int__" else 1

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """What ``batch_norm`` dispatches; on ``meta`` PyTorch makes it of many calls in Python, which takes long."""
        with self.quiet():
            y, small = torch.empty_like(input), input.new_empty(input.shape[1] if input.ndim > 1 else 1)
        before = len(self._launches)
        arguments = (input, weight, bias, running_mean, running_var, training, momentum, eps)
        call = AtenCall("native_batch_norm", arguments, {}, (y, small, small))
        self.add(call, one_pass=False)
        # In evaluation it has no statistics that the rest waits for.
        self.connect(call.name if training else "batch_norm", before, call.tensors, (y,))
        return y

    @property
    def running(self) -> str:
        """Name of the innermost module that is running; empty for the root."""
        return self._stack[-1]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Calls inside are part of a kernel that is taken down already."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow which module is running."""
        hooks: list[Any] = []
        names = {id(module): module_name(name) for name, module in reversed(list(self._module.named_modules()))}

        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(names[id(module)])
            self._calls.append(HostCall("module", self.phase))
            self._mark()

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._stack.pop()
            self._mark()

        for module in dict.fromkeys(self._module.modules()):
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave))

        def finished(name: str) -> Callable[[Tensor], None]:
            return lambda _: self._gradients.append((name, len(self._launches)))

        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad:
                after = parameter.register_post_accumulate_grad_hook
                hooks.append(after(finished(name)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _mark(self) -> None:
        number, name = torch._C._autograd._get_sequence_nr(), self._stack[-1]
        if number == self._numbers[-1]:
            self._modules[-1] = name
        else:
            self._numbers.append(number)
            self._modules.append(name)

    def _where(self) -> str:
        if self.phase == "optimizer":
            return ""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1]
        # Numbers are counted across threads' whole lives; AccumulateGrad has the largest there is.
        place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[max(place, 0)]

    def trace(self) -> EagerTrace:
        unsupported = tuple(Unsupported(f"aten.{op}", n, why) for (op, why), n in self._unsupported.items())
        recorded = (tuple(self._launches), tuple(self._calls))
        graph = tuple(self._graph or ())
        assumed = tuple(f"{text} ({count} x)" for text, count in self._assumed.items())
        return EagerTrace(*recorded, unsupported, tuple(self._gradients), frozenset(self._incomplete), graph, assumed)


_LOWER = {
    nn.functional.linear,
    *(
        getattr(where, f"{name}{axes}d")
        for where in (nn.functional, torch)
        for name in ("conv", "conv_transpose")
        for axes in (1, 2, 3)
    ),
    *(getattr(torch, name) for name in ["lstm", "gru", "rnn_tanh", "rnn_relu", "einsum", "addbmm"]),
    *(getattr(where, name) for where in (torch, Tensor) for name in ["matmul", "bmm", "mm", "addmm", "baddbmm", "mv"]),
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    nn.functional.scaled_dot_product_attention,
}
_UPPER = {
    *(getattr(nn.functional, name) for name in ("layer_norm", "softmax", "log_softmax", "group_norm")),
    *(torch.layer_norm, torch.softmax, torch.pow, Tensor.softmax, Tensor.pow),
}


#: Calls that read a value. Those that decide (``bool``) are refused.
_ITEMS = {Tensor.item, Tensor.__int__, Tensor.__float__}


#: PyTorch's function without its own check for modes, so that the calls inside it reach the mode.
_multi_head_attention = FunctionType(
    nn.functional.multi_head_attention_forward.__code__,
    {**vars(nn.functional), "has_torch_function": lambda _: False},
    argdefs=nn.functional.multi_head_attention_forward.__defaults__,
)


class _AsOnGpu(TorchFunctionMode):
    """Replaces what PyTorch composes on ``meta`` and runs as one kernel on a GPU; casts as autocast does."""

    def __init__(self, recorder: _Recorder, autocast: torch.dtype | None) -> None:
        super().__init__()
        self._recorder, self._autocast = recorder, autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._autocast is not None:
            if func in _LOWER:
                args, kwargs = _cast(args, kwargs, self._autocast)
            elif func in _UPPER:
                args, kwargs = _cast(args, kwargs, torch.float32)
        if func in (nn.functional.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func is nn.functional.multi_head_attention_forward:
            with self:
                return _multi_head_attention(*args, **kwargs)
        if func in (nn.functional.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default):
            return fused_attention(self._recorder, func, args, kwargs)
        if func in RECURRENT and not (isinstance(args[1], Tensor) and isinstance(args[3], list | tuple)):
            return recurrent(self._recorder, RECURRENT[func], *args)
        if func is nn.functional.one_hot and isinstance(classes := kwargs.get("num_classes", args[-1]), int):
            self._recorder.values.choose(args[0], classes)
        if func is Tensor.__bool__:  # a decision is refused
            with self._recorder.quiet():
                return func(*args)
        if func is Tensor.tolist and args[0].is_meta:
            self._recorder.assume("tolist", args[0])
            return torch.zeros(args[0].shape, dtype=torch.int64, device="cpu").tolist()
        if func in _ITEMS and args[0].is_meta:
            return self._recorder.assume(func.__name__, args[0])
        if isinstance(func, torch._ops.OpOverload) and kwargs.get("device") is not None:
            kwargs["device"] = "meta"  # a new tensor of an exported program, which names the device of its export
        if func is nn.functional.batch_norm and not torch.is_grad_enabled():
            return self._recorder.batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> Any:
        train = _.get("train", training)
        return torch.ops.aten.native_dropout(input, p, True)[0] if train and p > 0 else input


def _cast(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    def to(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _FLOATS else value

    return tuple(tree_map(to, args)), tree_map(to, kwargs)


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


_NAME = "scaled_dot_product_attention"


def fused_attention(recorder: _Recorder, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Call ``scaled_dot_product_attention`` and take down its fused kernels instead of its parts."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v, mask = (given.pop(name, None) for name in names[:4])

    def attend(*tensors: Tensor) -> Tensor:
        with recorder.quiet(), torch.no_grad():
            return func(*tensors[:3], attn_mask=mask, **given)

    if len(q.shape) != 4:
        recorder.missing(_NAME, "of other than four axes")
        with recorder.quiet():
            return func(q, k, v, attn_mask=mask, **given)
    causal = bool(given.get("is_causal"))
    sizes = (q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], q.shape[3])
    fields, work = attention_kernel(dtype_of(q), *sizes, causal)
    remark = "attention without its mask, which is not read" if mask is not None else ""
    start = recorder.launch(_NAME, Launches((fields,), remark, (work,)))

    def backward() -> None:
        remark = "the backward kernel as three forward kernels"
        kernels = Launches((fields,) * BACKWARD_KERNELS, remark, (work,) * BACKWARD_KERNELS)
        start = recorder.launch(f"{_NAME}_backward", kernels)
        recorder.connect(f"{_NAME}_backward", start, (q, k, v), (), is_library=True)

    trained = (q, k, v) if mask is None or not mask.requires_grad else (q, k, v, mask)
    result = _one_node(recorder, attend, trained, backward)
    recorder.connect(_NAME, start, (q, k, v), (result,), is_library=True)
    return result  # type: ignore[no-any-return]


def _one_node(
    recorder: _Recorder, compute: Callable[..., Any], tensors: Sequence[Tensor], backward: Callable[[], None]
) -> Any:
    """``compute(*tensors)`` as one node of autograd; ``backward`` takes down the kernels of its gradient."""

    class FusedKernels(torch.autograd.Function):
        """Autograd's node of the fused kernels."""

        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return compute(*tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with recorder.quiet():
                results = tuple(
                    torch.empty_like(t) if wanted else None
                    for t, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
                )
            backward()
            return results

    return FusedKernels.apply(*tensors)  # type: ignore[no-untyped-call]


#: PyTorch's recurrent networks -> gates of a cell.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
#: The calls of modules and of exported programs -> name.
RECURRENT = {call: name for name in GATES for call in (getattr(torch, name), getattr(torch.ops.aten, name).input)}
#: Hidden sizes up to this run in cuDNN's persistent kernel, which holds the weights in registers.
MAX_PERSISTENT = 128


def recurrent(
    recorder: _Recorder,
    name: str,
    x: Tensor,
    state: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Take down the kernels of cuDNN's recurrent network: one product of all inputs a layer, then the steps.

    Small layers run their steps in one persistent kernel. Others launch a product and an element-wise kernel a step;
    neighbouring layers overlap.
    """
    states = (state,) if isinstance(state, Tensor) else tuple(state)
    batch, steps = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    directions = 2 if bidirectional else 1
    hidden, width = states[-1].shape[-1], states[0].shape[-1] * directions
    gates = GATES[name]
    dtype = str(x.dtype).removeprefix("torch.")
    persistent = hidden <= MAX_PERSISTENT

    def take_down(call: str, factor: int) -> None:
        for layer in range(layers):
            inputs = x.shape[-1] if layer == 0 else width
            sizes = {"operator": "linear", "dtype": dtype, "n": gates * hidden, "bias": True}
            start = recorder.launch(call, Launches(({**sizes, "m": batch * steps, "k": inputs},) * directions * factor))
            recorder.connect(call, start, (x,), (), is_library=True)
            if persistent:
                cycles = (10_000 + 850 * steps) * factor
                work = KernelWork("a persistent kernel", cycles=cycles, steps=steps, replaces=True)
            else:
                share = 1.4 if layers == 1 else 0.9
                work = KernelWork("steps one after another", steps=steps * factor, step_share=share)
            one_step = {**sizes, "m": batch, "k": hidden}
            remark = "the steps of a recurrent layer as products"
            operators = Launches((one_step,) * directions, remark, (work,) * directions)
            times = directions * factor * (1 if persistent else steps)
            start = recorder.launch(f"{call}_steps", operators, times=times)
            recorder.connect(f"{call}_steps", start, (x,), (), times=times, is_library=True)

    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        shape = (batch, steps, width) if batch_first else (steps, batch, width)
        with recorder.quiet():
            return (x.new_empty(shape), *(torch.empty_like(s) for s in states))

    take_down(name, 1)
    # The gradients of the inputs and of the weights.
    return _one_node(  # type: ignore[no-any-return]
        recorder, compute, (x, *states, *weights), lambda: take_down(f"{name}_backward", 2)
    )
