"""Lifespans of the jobs of proposals and of the watch for drift."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from cdmpp_server.adapt.processes import adapting
from cdmpp_server.background import background
from cdmpp_server.drift.job import KIND, ProposalJob
from cdmpp_server.drift.watch import DriftWatch
from cdmpp_server.settings import Settings


@asynccontextmanager
async def handlers(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Provide the executor of the jobs; entered before the runners start."""
    state = app.state
    make = adapting(settings.adapt_memory_bytes)
    state.job_handlers = {KIND: ProposalJob(state.store, state.proposals, state.models, state.sandbox, make)}
    yield


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Watch for drift while the application runs; jobs must be running."""
    state = app.state

    def on_job() -> None:
        for runner in state.runners:
            runner.wake()

    state.drift = DriftWatch(state.store, state.proposals, state.jobs, state.models, on_job)
    if not settings.propose_models:
        yield
        return
    async with background(state.drift.serve()):
        yield
