"""``predict_module`` of the predictor in this process and of the clients of a service.

The kernels are listed in this process. Only their latencies come from the predictor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

from cdmpp.predict.modules.prediction import (
    DEFAULT_FRAMEWORK,
    DEFAULT_PROTOCOL,
    ModulePrediction,
    ModulePredictions,
    module_predictions,
)
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Device, Predictions, check_settings, device_list
from cdmpp.programs.frontends.torch_module import Mode, list_module
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Protocol


class ModuleOptions(TypedDict, total=False):
    """Options of :meth:`ModulePredictor.predict_module`."""

    mode: Mode
    protocol: Protocol
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
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = DEFAULT_FRAMEWORK,
        dtype: Any = None,
        autocast: Any = None,
        optimizer: str | Callable[..., Any] | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        implementation: str | None = None,
    ) -> ModulePrediction | ModulePredictions:
        """Predict one run of a torch module: its kernels are listed without running them, and their latencies added.

        Parameters
        ----------
        module : torch.nn.Module or torch.export.ExportedProgram
            Parameters may be on ``meta``. The module does not change.
        example_inputs : tuple, mapping, Tensor or None
            Positional arguments, keyword arguments, or the only argument; only shapes and types count. None for an
            exported program: the inputs that it was exported with.
        device : device as in :meth:`predict`, or a sequence of d devices
        mode : {"inference", "training"}
            ``eval()`` and the forward pass; or ``train()``, the forward and the backward pass. The backward pass starts
            at the ``loss`` of the result, or else at all its tensors.
        protocol, framework
            Default: calls from the host by PyTorch.
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
            With a sequence of devices, a list of d of them (:class:`ModulePredictions`).

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
        check_settings(protocol, framework, implementation)
        devices = device_list(device)
        listing = list_module(module, example_inputs, mode=mode, dtype=dtype, autocast=autocast, optimizer=optimizer)
        predictions = self.predict(
            listing.programs,
            devices,
            protocol=protocol,
            framework=framework,
            quantiles=quantiles,
            implementation=implementation,
        )
        return module_predictions(listing, predictions, device)
