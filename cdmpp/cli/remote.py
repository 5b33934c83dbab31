"""A plan made by a service as a job, followed from here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from cdmpp.planning.registry import PlannerSpec

if TYPE_CHECKING:
    from cdmpp.compose.budget import Progress

#: Seconds between two looks, and for which the best answer of a cancelled job is waited for.
_LOOK_S, _LAST_S = 0.5, 3.0


def solve_remotely(
    kind: PlannerSpec, value: dict[str, Any], url: str, listen: Callable[[Progress], None]
) -> dict[str, Any]:
    """The answer of a job at a service. Ctrl-C cancels the job, and gives the best answer so far.

    Raises
    ------
    CdmppError
        What the service refuses, or the job's own error.
    typer.Abort
        It was cancelled before it had any answer.
    """
    from cdmpp.client import PredictorClient
    from cdmpp.client.plans import FINAL, answer_of
    from cdmpp.compose.budget import Progress

    with PredictorClient(url) as client:
        began = time.monotonic()
        id = client.submit(kind.name, value)
        try:
            while (job := client.job(id))["state"] not in FINAL:
                listen(Progress(time.monotonic() - began, job["progress"], job["best"], job["bound"]))
                time.sleep(_LOOK_S)
        except KeyboardInterrupt:
            client.cancel(id)
            print("cancelled: the best answer so far", file=sys.stderr)
            until = time.monotonic() + _LAST_S
            while (job := client.job(id))["answer"] is None and time.monotonic() < until:
                time.sleep(_LOOK_S)
            if job["answer"] is None:
                raise typer.Abort from None
            found: dict[str, Any] = job["answer"]
            return found
        return answer_of(job)
