"""torch module -> the library kernels that eager PyTorch launches for it, forward and backward.

The module runs once on torch's ``meta`` device, which has shapes and no data: nothing is computed, nothing is
allocated, and a network that fits no GPU can be listed. Every call that PyTorch dispatches below autograd is
mapped by :mod:`cdmpp.frontends.eager_rules`, so the backward pass is what autograd really runs and not a
multiple of the forward pass.
"""

from __future__ import annotations

import bisect
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.frontends.eager_rules import Call, Fields, NoRuleError, outcome
from cdmpp.frontends.graph import Unsupported
from cdmpp.programs.operators import OperatorSpec, make_operator

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Launch:
    """One kernel.

    Attributes
    ----------
    spec : OperatorSpec
    call : str
        The ATen call that launches it.
    module : str
        Qualified name of the innermost module that made the call; of a backward call, of the forward call
        that it differentiates. Empty for the root.
    phase : {"forward", "backward"}
    remark : str
        Why the operator is not the call's own, where it is not.
    """

    spec: OperatorSpec
    call: str
    module: str
    phase: Phase
    remark: str = ""


@dataclass(frozen=True)
class EagerTrace:
    """The launches of one run of a module, in order.

    Attributes
    ----------
    launches : tuple of Launch
    unsupported : tuple of Unsupported
        Calls that launch something for which there is no operator, by name and number. Nothing is left out of
        both.
    gradients : tuple of (str, int)
        Parameters in the order in which the backward pass finishes their gradients, by qualified name, and
        how many of ``launches`` come before. A parameter that several modules share has its first name.
    """

    launches: tuple[Launch, ...]
    unsupported: tuple[Unsupported, ...] = ()
    gradients: tuple[tuple[str, int], ...] = ()

    def of(self, phase: Phase) -> list[Launch]:
        """The launches of one pass."""
        return [launch for launch in self.launches if launch.phase == phase]

    def counts(self, phase: Phase | None = None) -> dict[OperatorSpec, int]:
        """Operator -> number of launches, in the order of first occurrence."""
        return dict(Counter(one.spec for one in self.launches if phase in (None, one.phase)))


def eager_trace(
    module: nn.Module,
    inputs: Sequence[Tensor],
    *,
    backward: bool = False,
    accumulate: bool = False,
    autocast: torch.dtype | None = None,
) -> EagerTrace:
    """List the kernels of one forward pass, and of the backward pass if asked for.

    Parameters
    ----------
    module : torch.nn.Module
        Its mode (``train()``, ``eval()``) is kept. A module on another device is traced as a copy on
        ``meta``.
    inputs : sequence of Tensor
        Positional arguments.
    backward : bool
        Also run backward from a gradient of the output; parameters that require a gradient get one. Needs a
        module that returns a tensor, or a tuple or dictionary of them.
    accumulate : bool
        Gradients are there from an earlier pass: each new one is added to the old.
    autocast : torch.dtype, optional
        As under ``torch.autocast``: products in this type, normalisations and softmax in float32, casts
        between.

    Raises
    ------
    InvalidProgramError
        The module does not run without data: it looks at values, or makes tensors on a device of its own.

    Notes
    -----
    Kernels are those of a GPU: dropout is one kernel, and attention that is called by
    ``scaled_dot_product_attention`` is one fused kernel forward; its backward is written out.
    """
    module = _on_meta(module)
    given = [_meta(x) for x in inputs]
    recorder = _Recorder(module)
    try:
        with ExitStack() as stack:
            stack.enter_context(recorder.watching())
            stack.enter_context(torch.set_grad_enabled(backward))
            stack.enter_context(torch.device("meta"))
            stack.enter_context(_AsOnGpu(recorder, autocast))
            stack.enter_context(recorder)
            result = module(*given)
            if backward:
                if accumulate:
                    _give_gradients(module)
                _run_backward(result, recorder)
    except CdmppError:
        raise
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise InvalidProgramError(
            f"{type(module).__name__}: does not run without data: {line}",
            hint="a module whose control flow depends on values cannot be listed",
        ) from None
    return recorder.trace()


def _meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without data: the caller's module keeps its weights, gradients and hooks."""
    tensors = {id(t): torch.empty_like(t, device="meta") for t in (*module.parameters(), *module.buffers())}
    for t in module.parameters():
        # deepcopy takes what stands in its memo for a copy: no weight is duplicated on the way.
        tensors[id(t)] = nn.Parameter(tensors[id(t)], requires_grad=t.requires_grad)
    return copy.deepcopy(module, tensors)


def _give_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _run_backward(result: Any, recorder: _Recorder) -> None:
    values = result.values() if isinstance(result, dict) else result
    outputs = [
        t
        for t in (values if not isinstance(values, Tensor) else (values,))
        if isinstance(t, Tensor) and t.requires_grad
    ]
    if not outputs:
        raise InvalidProgramError(
            "backward: no output of the module requires a gradient", hint="leave requires_grad of parameters on"
        )
    recorder.phase = "backward"
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every call below autograd."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "forward"
        self._module = module
        self._launches: list[Launch] = []
        self._unsupported: Counter[tuple[str, str]] = Counter()
        self._stack: list[str] = [""]
        # Autograd numbers the operations of the forward pass: (number, module) wherever the module changes.
        self._numbers: list[int] = [0]
        self._modules: list[str] = [""]
        self._gradients: list[tuple[str, int]] = []
        self._quiet = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._quiet:
            self.add(Call(func.overloadpacket.__name__, args, kwargs or {}, out))
        return out

    def add(self, call: Call) -> None:
        """Take down what a call launches."""
        try:
            operators = outcome(call)
            specs = [make_operator(fields) for fields in operators.launches]
        except NoRuleError as error:
            self._unsupported[call.name, str(error)] += 1
            return
        except CdmppError as error:
            self._unsupported[call.name, error.message] += 1
            return
        where = self._where()
        self._launches += [Launch(spec, call.name, where, self.phase, operators.remark) for spec in specs]

    def launch(self, call: str, fields: Fields) -> None:
        """Take down a kernel that PyTorch would launch on a GPU, but not on ``meta``."""
        self._launches.append(Launch(make_operator(fields), call, self._where(), self.phase))

    def missing(self, call: str, reason: str) -> None:
        """Take down a kernel that has no operator."""
        self._unsupported[call, reason] += 1

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
        names = {id(module): name for name, module in reversed(list(self._module.named_modules()))}

        def enter(module: nn.Module, _: Any) -> None:
            self._stack.append(names[id(module)])
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
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1]
        # Numbers are counted across threads' whole lives; AccumulateGrad has the largest there is.
        place = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[max(place, 0)]

    def trace(self) -> EagerTrace:
        unsupported = tuple(Unsupported(f"aten.{op}", n, why) for (op, why), n in self._unsupported.items())
        return EagerTrace(tuple(self._launches), unsupported, tuple(self._gradients))


_LOWER = {
    nn.functional.linear,
    nn.functional.conv1d,
    nn.functional.conv2d,
    torch.conv2d,
    torch.matmul,
    torch.bmm,
    torch.mm,
    torch.addmm,
    torch.baddbmm,
    Tensor.matmul,
    Tensor.__matmul__,
    nn.functional.scaled_dot_product_attention,
}
_UPPER = {
    nn.functional.layer_norm,
    torch.layer_norm,
    nn.functional.softmax,
    torch.softmax,
    Tensor.softmax,
    nn.functional.log_softmax,
    nn.functional.group_norm,
    torch.pow,
    Tensor.pow,
}


class _AsOnGpu(TorchFunctionMode):
    """Replaces what PyTorch composes on ``meta`` and runs as one kernel on a GPU; casts as autocast does."""

    def __init__(self, recorder: _Recorder, autocast: torch.dtype | None) -> None:
        super().__init__()
        self._recorder, self._autocast = recorder, autocast

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._autocast is not None:
            if func in _LOWER:
                args, kwargs = _cast(args, kwargs, self._autocast)
            elif func in _UPPER:
                args, kwargs = _cast(args, kwargs, torch.float32)
        if func in (nn.functional.dropout, torch.dropout):
            return self._dropout(*args, **kwargs)
        if func is nn.functional.scaled_dot_product_attention and not torch.is_grad_enabled():
            return self._attention(func, args, kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any) -> Any:
        train = _.get("train", training)
        return torch.ops.aten.native_dropout(input, p, True)[0] if train and p > 0 else input

    def _attention(self, func: Any, args: Any, kwargs: Any) -> Any:
        q, k = args[0], args[1]
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        causal = bool(kwargs.get("is_causal", args[5] if len(args) > 5 else False))
        with self._recorder.quiet():
            out = func(*args, **kwargs)
        if len(q.shape) != 4 or mask is not None:
            self._recorder.missing("scaled_dot_product_attention", "with a mask, or of other than four axes")
            return out
        self._recorder.launch(
            "scaled_dot_product_attention",
            {
                "operator": "attention_prefill" if causal else "attention_encoder",
                "dtype": str(q.dtype).removeprefix("torch."),
                "batch": q.shape[0],
                "q_len": q.shape[2],
                "past_len": k.shape[2] - q.shape[2] if causal else 0,
                "heads": q.shape[1],
                "kv_heads": k.shape[1],
                "head_dim": q.shape[3],
            },
        )
        return out


def _cast(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    def to(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _FLOATS else value

    return tuple(to(a) for a in args), {key: to(value) for key, value in kwargs.items()}


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
