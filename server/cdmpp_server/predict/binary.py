"""Binary bodies of ``/predict``: encoded programs as arrays (safetensors)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cdmpp.errors import CdmppError
from cdmpp.predict.bulk import MEDIA_TYPE, FeatureAnswers, FeatureQueries
from cdmpp_server.body import INLINE_BYTES
from cdmpp_server.concurrency import Deadline
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.predict.service import PredictionService, bugs_hidden
from cdmpp_server.problems import ProblemError, SchemaViolation

__all__ = ["MEDIA_TYPE", "predict_features"]


async def predict_features(
    body: bytes | bytearray,
    service: PredictionService,
    metrics: Metrics,
    deadline: Deadline,
    max_items: int,
    on_items: Callable[[int], None],
) -> bytes:
    """The :class:`FeatureAnswers` body of a :class:`FeatureQueries` body, rows in the same order.

    One faulty row refuses the whole request.

    Raises ProblemError: 422 for an invalid body, 404 for an unknown model or device, 503 and 504 under load.
    """
    with bugs_hidden("/predict"):
        try:
            read = partial(FeatureQueries.from_bytes, body)
            queries = await service.do(len(body) <= INLINE_BYTES, read, deadline)
            if not 1 <= len(queries) <= max_items:
                hint = f"send 1 to {max_items} rows in a request"
                raise ProblemError(
                    "invalid_request", f"{len(queries)} rows", hint, errors=[SchemaViolation(path="rows", message=hint)]
                )
            on_items(len(queries))
            service.batcher.learn(len(body), len(queries))
            predictor = await service.model(queries.model)
            answers = await service.batcher.ask_features(predictor, queries, deadline)
        except CdmppError as error:
            status = 404 if error.code == "unknown_device" else 422
            raise ProblemError(error.code, error.message, error.hint, status=status) from None
        metrics.items(_kinds(queries, answers))
        return answers.to_bytes()


def _kinds(queries: FeatureQueries, answers: FeatureAnswers) -> list[tuple[str, str]]:
    names = [device if isinstance(device, str) else device.name for device in queries.devices]
    return [(names[number], label) for number, label in zip(queries.device.tolist(), answers.labels, strict=True)]
