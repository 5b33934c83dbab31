"""Plans that a service makes as jobs, with progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from cdmpp.plan.registry import PlannerSpec

if TYPE_CHECKING:
    from cdmpp.predict.requests.budget import Progress

#: Seconds between two requests for progress, and to wait for the best plan of a cancelled job.
_POLL_S, _CANCEL_S = 0.5, 3.0


def solve_remotely(
    spec: PlannerSpec, value: dict[str, Any], url: str, listener: Callable[[Progress], None]
) -> dict[str, Any]:
    """Make a plan by a job of a service. Ctrl-C cancels the job and returns its best plan so far.

    Raises CdmppError: the service refuses the request, or the job fails; typer.Abort: the job was cancelled before it
    had a plan.
    """
    from cdmpp.client import PredictorClient
    from cdmpp.client.operations import FINAL, answer_of
    from cdmpp.predict.requests.budget import Progress

    with PredictorClient(url) as client:
        started = time.monotonic()
        id = client.submit(spec.name, value)
        try:
            while (job := client.job(id))["state"] not in FINAL:
                listener(Progress(time.monotonic() - started, job["progress"], job["best"], job["bound"]))
                time.sleep(_POLL_S)
        except KeyboardInterrupt:
            client.cancel(id)
            print("cancelled: this is the best plan so far", file=sys.stderr)
            until = time.monotonic() + _CANCEL_S
            while (job := client.job(id))["answer"] is None and time.monotonic() < until:
                time.sleep(_POLL_S)
            if job["answer"] is None:
                raise typer.Abort from None
            best: dict[str, Any] = job["answer"]
            return best
        return answer_of(job)
