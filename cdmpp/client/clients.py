"""The synchronous and the asyncio client; both have every operation of :class:`Operations`."""

from __future__ import annotations

import asyncio
import inspect
from asyncio import sleep as sleep_async
from collections.abc import Callable, Coroutine, Sequence
from time import sleep
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, Unpack, overload

from cdmpp.client.operations import Operations
from cdmpp.client.transport import Attempts, HttpAnswer, HttpCall, Steps, httpx2, options
from cdmpp.predict.modules.execution import Execution, HostProfile, is_compiled
from cdmpp.predict.modules.prediction import (
    DEFAULT_EXECUTION,
    KERNEL_PROTOCOL,
    ModulePrediction,
    ModulePredictions,
    module_predictions,
)
from cdmpp.predict.modules.prediction import DEFAULT_FRAMEWORK as MODULE_FRAMEWORK
from cdmpp.predict.modules.predictor import ModuleOptions, ModulePredictor, checked_timings, execution_of, fit_host
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Device, check_settings, device_list
from cdmpp.programs.frontends.torch_module import Mode, list_module
from cdmpp.programs.query_options import Protocol

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(operation: Callable[Concatenate[Operations, P], Steps[T]]) -> Callable[Concatenate[Any, P], T]:
    """The method of :class:`PredictorClient` for an operation."""

    def method(self: PredictorClient, /, *arguments: P.args, **options: P.kwargs) -> T:
        return self._run(operation(self._operations, *arguments, **options))

    _document(method, operation, "PredictorClient")
    return method


def _coroutine(
    operation: Callable[Concatenate[Operations, P], Steps[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of :class:`AsyncPredictorClient` for an operation."""

    async def method(self: AsyncPredictorClient, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await self._run(operation(self._operations, *arguments, **options))

    _document(method, operation, "AsyncPredictorClient")
    return method


def _document(method: Callable[..., Any], operation: Callable[..., Any], owner: str) -> None:
    """Give a method the name, text and signature of its operation, for ``help()`` and the documentation."""
    signature = inspect.signature(operation)
    result = str(signature.return_annotation).removeprefix("Steps[").removesuffix("]")
    method.__name__, method.__doc__ = operation.__name__, operation.__doc__
    method.__qualname__ = f"{owner}.{operation.__name__}"
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]


class _Connected:
    """Settings of both clients, and their connections."""

    _library: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 4,
        model: str | None = None,
        transport: Any = None,
    ) -> None:
        self._url, self._timeout_s, self._retries = url, timeout_s, retries
        self._http = self._library(**options(url, api_key, transport))
        self._operations = Operations(model, timeout_s)


class PredictorClient(_Connected, ModulePredictor):
    """Client of a cdmpp service; implements :class:`cdmpp.predict.interface.Predictor`.

    Predictions equal those of the service's model to the last digit. Connections are reused. Temporary refusals
    (503, 429) and broken connections are retried with increasing waits, not before the service's ``Retry-After``.
    Lists longer than the service's limit are split into several requests. Safe to share between threads.

    Parameters
    ----------
    url : str
        For example ``http://127.0.0.1:8000``.
    timeout_s : float
        Time limit of an operation with all its attempts and requests.
    retries : int
        Further attempts after the first, for each request.
    model : str, optional
        Model of the service that predicts (``GET /models``); default: the loaded one.
    transport : httpx2.BaseTransport, optional
        Transport for tests, instead of the network.

    Raises
    ------
    MissingDependencyError
        httpx2 is not installed; the hint names the extra ``client``.

    Notes
    -----
    Any method may raise OverloadedError (the service refused every attempt), DeadlineExceededError (no response
    in time), the class for the code of a refusal (UnknownDeviceError, DataError, ...), or ServiceError (the
    service is not reachable, the API key is unknown, or the service has a bug).

    Examples
    --------
    >>> with PredictorClient("http://127.0.0.1:8000") as client:                # doctest: +SKIP
    ...     client.predict(["linear:m=512,n=4096,k=1024,dtype=float16"], "t4")
    """

    _library = httpx2.Client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def model_id(self) -> str:
        """Identity of the model of the last response; before the first, of the loaded model."""
        return self._run(self._operations.model_id())

    predict = _blocking(Operations.predict)
    predict_queries = _blocking(Operations.predict_queries)
    predict_features = _blocking(Operations.predict_features)
    curve = _blocking(Operations.curve)
    llm = _blocking(Operations.llm)
    llm_calibrate = _blocking(Operations.llm_calibrate)
    llm_simulate = _blocking(Operations.llm_simulate)
    training_step = _blocking(Operations.training_step)
    predict_onnx = _blocking(Operations.predict_onnx)
    register = _blocking(Operations.register)
    observe = _blocking(Operations.observe)
    observations = _blocking(Operations.observations)
    observed = _blocking(Operations.observed)
    plan = _blocking(Operations.plan)
    submit = _blocking(Operations.submit)
    job = _blocking(Operations.job)
    jobs = _blocking(Operations.jobs)
    cancel = _blocking(Operations.cancel)
    remove = _blocking(Operations.remove)
    support = _blocking(Operations.support)
    devices = _blocking(Operations.devices)

    def _run(self, steps: Steps[T]) -> T:
        attempts = Attempts(self._url, self._timeout_s, self._retries)
        actions = attempts.actions(steps)
        result: HttpAnswer | Exception | None = None
        try:
            while True:
                action, result = actions.send(result), None
                if isinstance(action, HttpCall):
                    result = self._send(action, attempts)
                else:
                    sleep(action)
        except StopIteration as done:
            value: T = done.value
            return value

    def _send(self, call: HttpCall, attempts: Attempts) -> HttpAnswer | Exception:
        request = self._http.build_request(call.method, call.path, **attempts.options(call))
        try:
            response = self._http.send(request, stream=True)
            try:
                body = bytearray()
                # The library's timeout is for each read; an answer that drips has to end too.
                for chunk in response.iter_bytes():
                    body += chunk
                    attempts.left_s()
                return HttpAnswer(response.status_code, response.headers, bytes(body))
            finally:
                response.close()
        except (httpx2.TransportError, TimeoutError) as error:
            return error


class AsyncPredictorClient(_Connected):
    """:class:`cdmpp.client.PredictorClient` for asyncio, with the same methods as coroutines.

    Parameters and errors are the same; ``transport`` is an ``httpx2.AsyncBaseTransport``. A client belongs to
    one event loop; its operations may run side by side.
    """

    _library = httpx2.AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    model_id = _coroutine(Operations.model_id)
    predict = _coroutine(Operations.predict)
    predict_queries = _coroutine(Operations.predict_queries)
    predict_features = _coroutine(Operations.predict_features)
    curve = _coroutine(Operations.curve)
    llm = _coroutine(Operations.llm)
    llm_calibrate = _coroutine(Operations.llm_calibrate)
    llm_simulate = _coroutine(Operations.llm_simulate)
    training_step = _coroutine(Operations.training_step)
    predict_onnx = _coroutine(Operations.predict_onnx)
    register = _coroutine(Operations.register)
    observe = _coroutine(Operations.observe)
    observations = _coroutine(Operations.observations)
    observed = _coroutine(Operations.observed)
    plan = _coroutine(Operations.plan)
    submit = _coroutine(Operations.submit)
    job = _coroutine(Operations.job)
    jobs = _coroutine(Operations.jobs)
    cancel = _coroutine(Operations.cancel)
    remove = _coroutine(Operations.remove)
    support = _coroutine(Operations.support)
    devices = _coroutine(Operations.devices)

    @overload
    async def predict_module(
        self, module: Any, example_inputs: Any, device: Device, **options: Unpack[ModuleOptions]
    ) -> ModulePrediction: ...

    @overload
    async def predict_module(
        self, module: Any, example_inputs: Any, device: Sequence[Device], **options: Unpack[ModuleOptions]
    ) -> ModulePredictions: ...

    async def predict_module(
        self,
        module: Any,
        example_inputs: Any,
        device: Device | Sequence[Device],
        *,
        mode: Mode = "inference",
        execution: Execution | None = None,
        host: Any = None,
        protocol: Protocol | None = None,
        framework: str | None = MODULE_FRAMEWORK,
        dtype: Any = None,
        autocast: Any = None,
        optimizer: str | Callable[..., Any] | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        implementation: str | None = None,
    ) -> ModulePrediction | ModulePredictions:
        """Predict one run of a torch module; see :meth:`LatencyPredictor.predict_module`.

        A thread lists the kernels, so that other coroutines go on.
        """
        execution, protocol = execution_of(module, execution, protocol)
        check_settings(protocol, framework, implementation)
        devices = device_list(device)
        how = {"mode": mode, "dtype": dtype, "autocast": autocast, "compiled": is_compiled(execution)}
        listing = await asyncio.to_thread(list_module, module, example_inputs, optimizer=optimizer, **how)
        predictions = await self.predict(
            listing.programs,
            devices,
            protocol=protocol,
            framework=framework,
            quantiles=quantiles,
            implementation=implementation,
        )
        return module_predictions(listing, predictions, device, execution, host)

    async def calibrate_host(
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
        """Fit a host's factor to a few timings; see :meth:`LatencyPredictor.calibrate_host`."""
        how = {"mode": mode, "dtype": dtype, "autocast": autocast, "compiled": is_compiled(execution)}
        runs = []
        for module, inputs, seconds in checked_timings(measured):
            listing = await asyncio.to_thread(list_module, module, inputs, **how)
            programs = await self.predict(
                listing.programs, device, protocol=KERNEL_PROTOCOL, framework=MODULE_FRAMEWORK
            )
            runs.append((listing, programs, seconds))
        return await asyncio.to_thread(fit_host, runs, device, host, execution)

    async def _run(self, steps: Steps[T]) -> T:
        attempts = Attempts(self._url, self._timeout_s, self._retries)
        actions = attempts.actions(steps)
        result: HttpAnswer | Exception | None = None
        try:
            while True:
                action, result = actions.send(result), None
                if isinstance(action, HttpCall):
                    result = await self._send(action, attempts)
                else:
                    await sleep_async(action)
        except StopIteration as done:
            value: T = done.value
            return value

    async def _send(self, call: HttpCall, attempts: Attempts) -> HttpAnswer | Exception:
        try:
            async with asyncio.timeout(attempts.left_s()):
                response = await self._http.request(call.method, call.path, **attempts.options(call))
            return HttpAnswer(response.status_code, response.headers, response.content)
        except (httpx2.TransportError, TimeoutError) as error:
            return error
