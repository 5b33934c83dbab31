"""The asyncio client."""

from __future__ import annotations

import asyncio
import warnings
from asyncio import sleep
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from cdmpp.predict.bulk import FeatureAnswers, FeatureQueries
from cdmpp.predict.client.answers import Observed, Registered
from cdmpp.predict.client.operations import Operations, Steps
from cdmpp.predict.client.plans import Plans, seconds_of
from cdmpp.predict.client.queries import Observation, ProgramLike
from cdmpp.predict.client.transport import Answer, Attempts, Call, httpx2, options
from cdmpp.predict.curves import Curve
from cdmpp.predict.curves.plan import Programs
from cdmpp.predict.curves.template import Axes
from cdmpp.predict.modules.prediction import DEFAULT_FRAMEWORK as MODULE_FRAMEWORK
from cdmpp.predict.modules.prediction import DEFAULT_PROTOCOL as MODULE_PROTOCOL
from cdmpp.predict.modules.prediction import ModulePrediction, ModulePredictions, module_predictions
from cdmpp.predict.modules.predictor import ModuleOptions
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Device, Predictions, Query, check_settings, device_list
from cdmpp.programs.frontends.torch_module import Mode, list_module
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Protocol

T = TypeVar("T")


class AsyncPredictorClient:
    """:class:`cdmpp.predict.client.PredictorClient` for asyncio, with the same methods as coroutines.

    Parameters and errors are the same; ``transport`` is an ``httpx2.AsyncBaseTransport``. A client belongs to
    one event loop; its operations may run side by side.
    """

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
        self._http = httpx2.AsyncClient(**options(url, api_key, transport))
        self._steps, self._plans = Operations(model), Plans(model)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def model_id(self) -> str:
        """Identity of the model of the last response; before the first, of the loaded model."""
        return await self._run(self._steps.model_id())

    async def predict(
        self,
        programs: Sequence[ProgramLike],
        device: Device | Sequence[Device],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
    ) -> Predictions:
        """Predict programs on one device or each of several, in order."""
        return await self._run(self._steps.predict(programs, device, protocol, framework, quantiles))

    async def predict_queries(
        self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> Predictions:
        """Predict queries with different programs, devices and settings, in order; errors are per query."""
        return await self._run(self._steps.predict_queries(queries, quantiles))

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
        protocol: Protocol = MODULE_PROTOCOL,
        framework: str | None = MODULE_FRAMEWORK,
        dtype: Any = None,
        autocast: Any = None,
        optimizer: str | Callable[..., Any] | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
    ) -> ModulePrediction | ModulePredictions:
        """Predict one run of a torch module; see :meth:`LatencyPredictor.predict_module`.

        A thread lists the kernels, so that other coroutines go on.
        """
        check_settings(protocol, framework)
        devices = device_list(device)
        types = {"dtype": dtype, "autocast": autocast}
        listing = await asyncio.to_thread(list_module, module, example_inputs, mode=mode, optimizer=optimizer, **types)
        predictions = await self.predict(
            listing.programs, devices, protocol=protocol, framework=framework, quantiles=quantiles
        )
        return module_predictions(listing, predictions, device)

    async def predict_questions(
        self, questions: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> Predictions:
        """Deprecated name of :meth:`predict_queries`."""
        warnings.warn("predict_questions is deprecated: use predict_queries", DeprecationWarning, stacklevel=2)
        return await self.predict_queries(questions, quantiles)

    async def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Predict encoded programs, as arrays in a binary body; order is kept."""
        return await self._run(self._steps.predict_features(queries))

    async def curve(
        self,
        programs: Programs,
        axes: Axes,
        devices: Sequence[Device],
        *,
        backend: Backend | None = None,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        monotone: Sequence[str] | None = None,
    ) -> Curve:
        """Predict a template over axes on devices."""
        return await self._run(
            self._steps.curve(programs, axes, devices, backend, protocol, framework, quantiles, monotone)
        )

    async def llm(
        self,
        config: Mapping[str, Any] | str | PathLike[str],
        device: Device | Sequence[Device],
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
    ) -> Any:
        """Estimate a language model on a device, or on a list of devices: the answer of ``POST /llm``."""
        options = {
            "tp": tp,
            "pp": pp,
            "ep": ep,
            "batch": batch,
            "input": input,
            "output": output,
            "dtype": dtype,
            "weights": weights,
            "framework": framework,
            "cuda_graph": cuda_graph,
        }
        return await self._run(self._steps.llm(config, device, options))

    async def predict_onnx(
        self,
        model: str | PathLike[str] | bytes,
        devices: Sequence[str],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Predict an ONNX model (a local file, or its bytes) on devices: totals and programs."""
        return await self._run(self._steps.predict_onnx(model, devices, protocol, framework, dims or {}))

    async def register(self, programs: Sequence[ProgramLike]) -> list[Registered]:
        """Register programs, so that they can be named by hash; order is kept."""
        return await self._run(self._steps.register(programs))

    async def observe(self, observations: Iterable[Observation]) -> list[Observed]:
        """Send measured latencies; results with an ``observation_id`` are stored durably."""
        return await self._run(self._steps.observe(observations))

    async def observations(self, device: str, *, digest: str | None = None, most: int = 1000) -> list[dict[str, Any]]:
        """Stored measurements of a device with their programs, newest first: ``GET /observations``.

        Parameters
        ----------
        device, digest : str
            Name of the device, and ``DeviceSpec.digest()``; without a digest every device of this name.
        most : int
            Maximum number of observations.
        """
        return await self._run(self._steps.observations(device, digest, most))

    async def observed(self) -> list[dict[str, Any]]:
        """Current error and drift by device: ``devices`` of ``GET /observe``."""
        rows: list[dict[str, Any]] = await self._run(self._steps.get("/observe", "devices"))
        return rows

    async def plan(self, kind: str, request: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Compute a replay or plan by the service; waits for long searches."""
        limit_s = self._timeout_s + seconds_of(request) if timeout_s is None else timeout_s
        return await self._run(self._plans.plan(kind, request), limit_s)

    async def submit(self, kind: str, request: Mapping[str, Any]) -> str:
        """Submit a plan as a job, with any budget; returns its id for :meth:`job` and :meth:`cancel`."""
        return await self._run(self._plans.submit(kind, request))

    async def job(self, job_id: str) -> dict[str, Any]:
        """State, progress, best value and bound of a job, and its answer or the best so far."""
        return await self._run(self._plans.job(job_id))

    async def jobs(self, limit: int = 100) -> list[dict[str, Any]]:
        """Jobs of this client's key or address without their answers, newest first: at most ``limit``, up to 1,000."""
        return await self._run(self._plans.jobs(limit))

    async def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancel a job, which keeps its best answer; returns the job."""
        return await self._run(self._plans.cancel(job_id))

    async def remove(self, job_id: str) -> None:
        """Remove a job with its answer; a queued or running one is cancelled first."""
        await self._run(self._plans.remove(job_id))

    async def support(self) -> dict[str, Any]:
        """Coverage of the loaded model."""
        found: dict[str, Any] = await self._run(self._steps.get("/support"))
        return found

    async def devices(self) -> list[dict[str, Any]]:
        """Every known device with its figures."""
        rows: list[dict[str, Any]] = await self._run(self._steps.get("/devices", "devices"))
        return rows

    async def _run(self, steps: Steps[T], timeout_s: float | None = None) -> T:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        attempts = Attempts(self._url, limit_s, self._retries)
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._answer(call, attempts))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _answer(self, call: Call, attempts: Attempts) -> Answer:
        attempts.begin()
        if call.after_s:
            await sleep(min(call.after_s, attempts.left_s()))
        while True:
            try:
                async with asyncio.timeout(attempts.left_s()):
                    answer = await self._send(call, attempts)
            except (httpx2.TransportError, TimeoutError) as error:
                wait_s = attempts.after_error(error, call)
            else:
                wait = attempts.after_answer(answer, call)
                if wait is None:
                    return answer
                wait_s = wait
            await sleep(wait_s)

    async def _send(self, call: Call, attempts: Attempts) -> Answer:
        response = await self._http.request(
            call.method,
            call.path,
            content=call.body,
            params=list(call.params) or None,
            headers=attempts.headers(call),
            timeout=attempts.left_s(),
        )
        return Answer(response.status_code, response.headers, response.content)
