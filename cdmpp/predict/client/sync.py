"""The synchronous client."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from time import sleep
from types import TracebackType
from typing import Any, Self, TypeVar

from cdmpp.predict.bulk import FeatureAnswers, FeatureQueries
from cdmpp.predict.client.answers import Observed, Registered
from cdmpp.predict.client.operations import Operations, Steps
from cdmpp.predict.client.plans import Plans, seconds_of
from cdmpp.predict.client.queries import Observation, ProgramLike
from cdmpp.predict.client.transport import Answer, Attempts, Call, httpx2, options
from cdmpp.predict.curves import Curve
from cdmpp.predict.curves.plan import Programs
from cdmpp.predict.curves.template import Axes
from cdmpp.predict.modules.predictor import ModulePredictor
from cdmpp.predict.prediction import DEFAULT_QUANTILES, Device, Predictions, Query
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Protocol

T = TypeVar("T")


class PredictorClient(ModulePredictor):
    """Client of a cdmpp service; implements :class:`cdmpp.predict.interface.Predictor`.

    Predictions equal those of the service's model to the last digit. Connections are reused. Temporary refusals
    (503, 429) and broken connections are retried with increasing waits, not before the service's ``Retry-After``.
    Lists longer than the service's limit are split into several requests. Safe to share between threads.

    Parameters
    ----------
    url : str
        For example ``http://127.0.0.1:8000``.
    api_key : str, optional
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
        self._http = httpx2.Client(**options(url, api_key, transport))
        self._steps, self._plans = Operations(model), Plans(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def model_id(self) -> str:
        """Identity of the model of the last response; before the first, of the loaded model."""
        return self._run(self._steps.model_id())

    def predict(
        self,
        programs: Sequence[ProgramLike],
        device: Device | Sequence[Device],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
    ) -> Predictions:
        """Predict programs on one device or each of several, in order; see :meth:`LatencyPredictor.predict`.

        A program may also be ``{"hash": text}`` of a registered one (:meth:`register`).
        """
        return self._run(self._steps.predict(programs, device, protocol, framework, quantiles))

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES) -> Predictions:
        """Predict queries with different programs, devices and settings, in order; errors are per query."""
        return self._run(self._steps.predict_queries(queries, quantiles))

    def predict_questions(
        self, questions: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> Predictions:
        """Deprecated name of :meth:`predict_queries`."""
        warnings.warn("predict_questions is deprecated: use predict_queries", DeprecationWarning, stacklevel=2)
        return self.predict_queries(questions, quantiles)

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Predict encoded programs, as arrays in a binary body; order is kept."""
        return self._run(self._steps.predict_features(queries))

    def curve(
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
        """Predict a template over axes on devices; see :func:`cdmpp.predict.curves.predict_curve`."""
        return self._run(self._steps.curve(programs, axes, devices, backend, protocol, framework, quantiles, monotone))

    def llm(
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
        """Estimate a language model on a device, or on a list of devices; see :func:`cdmpp.predict.llm.estimate`.

        The result is the answer of ``POST /llm``: the dictionary of an estimate, or a list of them. In a list, a
        device without an estimate has an ``error``.
        """
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
        return self._run(self._steps.llm(config, device, options))

    def predict_onnx(
        self,
        model: str | PathLike[str] | bytes,
        devices: Sequence[str],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Predict an ONNX model (a local file, or its bytes) on devices: totals and programs.

        The dictionary is the answer of ``POST /models/predict``.
        """
        return self._run(self._steps.predict_onnx(model, devices, protocol, framework, dims or {}))

    def register(self, programs: Sequence[ProgramLike]) -> list[Registered]:
        """Register programs, so that they can be named by hash; order is kept."""
        return self._run(self._steps.register(programs))

    def observe(self, observations: Iterable[Observation]) -> list[Observed]:
        """Send measured latencies; results with an ``observation_id`` are stored durably. A prediction counts once.

        Parameters
        ----------
        observations : iterable
            (prediction by this service or its ``prediction_id``, seconds), or a mapping with ``program``,
            ``device``, ``latency_s`` and settings.
        """
        return self._run(self._steps.observe(observations))

    def observations(self, device: str, *, digest: str | None = None, most: int = 1000) -> list[dict[str, Any]]:
        """Stored measurements of a device with their programs, newest first: ``GET /observations``.

        Parameters
        ----------
        device, digest : str
            Name of the device, and ``DeviceSpec.digest()``; without a digest every device of this name.
        most : int
            Maximum number of observations.
        """
        return self._run(self._steps.observations(device, digest, most))

    def observed(self) -> list[dict[str, Any]]:
        """Current error and drift by device: ``devices`` of ``GET /observe``."""
        rows: list[dict[str, Any]] = self._run(self._steps.get("/observe", "devices"))
        return rows

    def plan(self, kind: str, request: Mapping[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """Compute a replay or plan by the service, like :func:`cdmpp.make_plan`; waits for long searches.

        Parameters
        ----------
        kind : str
            "replay", "pipeline", ...: as ``cdmpp plan`` calls it.
        request : mapping
            As in docs/planning.md.
        timeout_s : float, optional
            Default: the client's own, beyond the request's ``budget_s``.

        Raises
        ------
        FieldError, InfeasibleError
            ``path`` names the field that is wrong.
        """
        limit_s = self._timeout_s + seconds_of(request) if timeout_s is None else timeout_s
        return self._run(self._plans.plan(kind, request), limit_s)

    def submit(self, kind: str, request: Mapping[str, Any]) -> str:
        """Submit a plan as a job, with any budget; returns its id for :meth:`job` and :meth:`cancel`."""
        return self._run(self._plans.submit(kind, request))

    def job(self, job_id: str) -> dict[str, Any]:
        """State, progress, best value and bound of a job, and its answer or the best so far."""
        return self._run(self._plans.job(job_id))

    def jobs(self, limit: int = 100) -> list[dict[str, Any]]:
        """Jobs of this client's key or address without their answers, newest first: at most ``limit``, up to 1,000."""
        return self._run(self._plans.jobs(limit))

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancel a job, which keeps its best answer; returns the job."""
        return self._run(self._plans.cancel(job_id))

    def remove(self, job_id: str) -> None:
        """Remove a job with its answer; a queued or running one is cancelled first."""
        self._run(self._plans.remove(job_id))

    def support(self) -> dict[str, Any]:
        """Coverage of the loaded model, as :meth:`LatencyPredictor.support`."""
        found: dict[str, Any] = self._run(self._steps.get("/support"))
        return found

    def devices(self) -> list[dict[str, Any]]:
        """Every known device with its figures."""
        rows: list[dict[str, Any]] = self._run(self._steps.get("/devices", "devices"))
        return rows

    def _run(self, steps: Steps[T], timeout_s: float | None = None) -> T:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        attempts = Attempts(self._url, limit_s, self._retries)
        try:
            call = next(steps)
            while True:
                call = steps.send(self._answer(call, attempts))
        except StopIteration as done:
            result: T = done.value
            return result

    def _answer(self, call: Call, attempts: Attempts) -> Answer:
        attempts.begin()
        if call.after_s:
            sleep(min(call.after_s, attempts.left_s()))
        while True:
            try:
                answer = self._send(call, attempts)
            except (httpx2.TransportError, TimeoutError) as error:
                wait_s = attempts.after_error(error, call)
            else:
                wait = attempts.after_answer(answer, call)
                if wait is None:
                    return answer
                wait_s = wait
            sleep(wait_s)

    def _send(self, call: Call, attempts: Attempts) -> Answer:
        request = self._http.build_request(
            call.method,
            call.path,
            content=call.body,
            params=list(call.params) or None,
            headers=attempts.headers(call),
            timeout=attempts.left_s(),
        )
        response = self._http.send(request, stream=True)
        try:
            body = bytearray()
            # The library's timeout is for each read; an answer that drips has to end too.
            for chunk in response.iter_bytes():
                body += chunk
                attempts.left_s()
            return Answer(response.status_code, response.headers, bytes(body))
        finally:
            response.close()
