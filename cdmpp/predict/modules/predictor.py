"""``predict_module`` of the predictor in this process and of the clients of a service.

The kernels are listed in this process. Only their latencies come from the predictor.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

from cdmpp.errors import DataError
from cdmpp.predict.modules.execution import EXECUTIONS, Execution, HostProfile, host_profile, is_compiled, run
from cdmpp.predict.modules.prediction import (
    DEFAULT_EXECUTION,
    DEFAULT_FRAMEWORK,
    KERNEL_PROTOCOL,
    ModulePrediction,
    ModulePredictions,
    kernels_of,
    module_predictions,
    specification_of,
)
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Device, Predictions, check_settings, device_list
from cdmpp.programs.frontends.torch_module import Mode, ModuleListing, is_compiled_module, list_module
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Protocol


class ModuleOptions(TypedDict, total=False):
    """Options of :meth:`ModulePredictor.predict_module`."""

    mode: Mode
    execution: Execution | None
    host: Any
    protocol: Protocol | None
    framework: str | None
    dtype: Any
    autocast: Any
    optimizer: str | Callable[..., Any] | None
    quantiles: Sequence[float]
    implementation: str | None


class ModulePredictor:
    """Predictor of modules that asks :meth:`predict` for the latencies of their kernels."""

    @abstractmethod
    def predict(
        self,
        programs: Sequence[TensorProgram | OperatorSpec | str | Mapping[str, Any]],
        device: Device | Sequence[Device],
        *,
        protocol: Protocol = "kernel",
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        implementation: str | None = None,
    ) -> Predictions:
        """Predict programs on one device, or on each of several."""

    @overload
    def predict_module(
        self, module: Any, example_inputs: Any, device: Device, **options: Unpack[ModuleOptions]
    ) -> ModulePrediction: ...

    @overload
    def predict_module(
        self, module: Any, example_inputs: Any, device: Sequence[Device], **options: Unpack[ModuleOptions]
    ) -> ModulePredictions: ...

    def predict_module(
        self,
        module: Any,
        example_inputs: Any,
        device: Device | Sequence[Device],
        *,
        mode: Mode = "inference",
        execution: Execution | None = None,
        host: Any = None,
        protocol: Protocol | None = None,
        framework: str | None = DEFAULT_FRAMEWORK,
        dtype: Any = None,
        autocast: Any = None,
        optimizer: str | Callable[..., Any] | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        implementation: str | None = None,
    ) -> ModulePrediction | ModulePredictions:
        """Predict one run of a torch module, whose kernels are listed without running them.

        Parameters
        ----------
        module : torch.nn.Module or torch.export.ExportedProgram
            Parameters may be on ``meta``. The module does not change.
        example_inputs : tuple, mapping, Tensor or None
            Positional arguments, keyword arguments, or the only argument; only shapes and types count. None for an
            exported program: the inputs that it was exported with.
        mode : {"inference", "training", "forward"}
            ``eval()`` and the forward pass; ``train()``, the forward and the backward pass; or the forward pass with
            the module's own flags and without gradients. The backward pass starts at the ``loss`` of the result, or
            else at all its tensors.
        execution : {"eager", "compiled", "cuda-graph", "compiled-graph"}, optional
            Who launches the kernels: the host one by one, while the device computes; ``torch.compile``, which fuses
            them; a captured graph; or both, as ``torch.compile(mode="reduce-overhead")``. Default: as
            ``torch.compile`` was told to for a module that it made, else eager.
        host : str, path, mapping or HostProfile, optional
            Host time of PyTorch's calls. Default: machines that usually have the device.
        protocol : {"kernel", "graph", "eager"}, optional
            In place of an execution: the sum of the programs, each with what this protocol includes.
        framework : str or None
            Default: PyTorch.
        dtype : torch.dtype or {"float32", "float16", "bfloat16"}, optional
            Type of floating-point parameters, buffers and inputs, as after ``module.to(dtype)``.
        autocast : torch.dtype or {"float16", "bfloat16"}, optional
            Products run in this type with casts before them, as under ``torch.autocast``.
        optimizer : {"sgd", "adam", "adamw"} or callable, optional
            In training, the update by PyTorch's optimizer with ``foreach=True``, or by the optimizer that the callable
            makes of the parameters. Default: no update.
        quantiles, implementation
            As in :meth:`predict`.

        Returns
        -------
        ModulePrediction
            With a sequence of d devices, a list of d of them (:class:`ModulePredictions`).

        Raises
        ------
        InvalidProgramError
            The module contains itself, does not accept the inputs, or its control flow depends on values.
        DataError
            An option is not known.
        UnknownDeviceError, InvalidDeviceError
            As in :meth:`predict`.
        MissingDependencyError
            torch is not installed.
        """
        execution, protocol = execution_of(module, execution, protocol)
        check_settings(protocol, framework, implementation)
        devices = device_list(device)
        listing = list_module(
            module,
            example_inputs,
            mode=mode,
            dtype=dtype,
            autocast=autocast,
            optimizer=optimizer,
            compiled=is_compiled(execution),
        )
        predictions = self.predict(
            listing.programs,
            devices,
            protocol=protocol,
            framework=framework,
            quantiles=quantiles,
            implementation=implementation,
        )
        return module_predictions(listing, predictions, device, execution, host)

    def calibrate_host(
        self,
        measured: Sequence[tuple[Any, Any, float]],
        device: Device,
        *,
        mode: Mode = "inference",
        execution: Execution = DEFAULT_EXECUTION,
        host: Any = None,
        dtype: Any = None,
        autocast: Any = None,
    ) -> HostProfile:
        """Fit a host's factor to a few timings of modules on one machine.

        Parameters
        ----------
        measured : sequence of (module, example_inputs, seconds)
            Modules with many small kernels tell most: their device waits for the host.
        mode, execution, dtype, autocast
            As in :meth:`predict_module`.
        host : optional
            The profile to start from.

        Returns
        -------
        HostProfile
            For ``predict_module(..., host=profile)``; ``profile.write("host.toml")`` makes a file of it.

        Raises
        ------
        DataError
            There is no timing, or one is not positive.
        """
        runs = []
        for module, inputs, seconds in checked_timings(measured):
            listing = list_module(
                module, inputs, mode=mode, dtype=dtype, autocast=autocast, compiled=is_compiled(execution)
            )
            programs = self.predict(listing.programs, device, protocol=KERNEL_PROTOCOL, framework=DEFAULT_FRAMEWORK)
            runs.append((listing, programs, seconds))
        return fit_host(runs, device, host, execution)


def checked_timings(measured: Sequence[tuple[Any, Any, float]]) -> Sequence[tuple[Any, Any, float]]:
    """The timings, if there are any and all are positive; else DataError."""
    if not measured or not all(seconds > 0 for *_, seconds in measured):
        raise DataError("a host is fitted to at least one positive time", hint="pass (module, inputs, seconds)")
    return measured


def fit_host(
    measured: Sequence[tuple[ModuleListing, Predictions, float]], device: Device, host: Any, execution: Execution
) -> HostProfile:
    """The host's profile with the factor that fits measured seconds of listed modules best."""
    spec = specification_of(device)
    profile = host_profile(spec, host)
    runs = [
        (listing.calls, [kernel.latency_s or 0.0 for kernel in kernels_of(listing, programs, spec)], seconds)
        for listing, programs, seconds in measured
    ]

    def logs(factor: float) -> list[float]:
        with_factor = {"host": profile.host.model_copy(update={"factor": factor})}
        tried = profile.model_copy(update=with_factor)
        return [math.log(run(calls, kernels, tried, execution).latency_s / s) for calls, kernels, s in runs]

    factor = min((0.1 * 1.05**step for step in range(100)), key=lambda value: sum(map(abs, logs(value))))
    left = logs(factor)
    residual = max(0.05, math.sqrt(sum(value * value for value in left) / len(left)))
    fitted = profile.host.model_copy(update={"factor": factor})
    source = {**profile.source, "host.factor": f"{len(runs)} timings"}
    return profile.model_copy(
        update={"name": f"{profile.name}-fitted", "host": fitted, "residual": min(residual, 2.0), "source": source}
    )


def execution_of(
    module: Any, execution: Execution | None, protocol: Protocol | None
) -> tuple[Execution | None, Protocol]:
    """The execution of a call, and the protocol of its programs; both at once are an error."""
    if execution not in (None, *EXECUTIONS):
        raise DataError(f"execution {execution!r} is not known", hint="one of: " + ", ".join(EXECUTIONS))
    if protocol is None:
        return execution or _execution_of_module(module), KERNEL_PROTOCOL
    if execution is not None:
        raise DataError(
            f"execution {execution} and protocol {protocol} exclude each other",
            hint="leave protocol out, or pass it alone for the sum of the programs",
        )
    return None, protocol


def _execution_of_module(module: Any) -> Execution:
    """The execution that ``torch.compile`` gave a module; eager without it."""
    if not is_compiled_module(module):
        return DEFAULT_EXECUTION
    made = module if hasattr(module, "_orig_mod") else module._compiled_call_impl
    options = made.get_compiler_config() if hasattr(made, "get_compiler_config") else None
    return "compiled-graph" if (options or {}).get("triton.cudagraphs") else "compiled"
