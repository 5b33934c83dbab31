"""Lifespan of the sandbox: ``app.state.sandbox`` while the application runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from cdmpp_server.sandbox.sandbox import Sandbox
from cdmpp_server.settings import Settings


@asynccontextmanager
async def lifespan(app: FastAPI, settings: Settings) -> AsyncIterator[None]:
    """Hold a sandbox; its workers start when they are first needed."""
    sandbox = Sandbox(
        workers=settings.sandbox_workers,
        memory_bytes=settings.sandbox_memory_bytes,
        timeout_s=settings.sandbox_timeout_s,
        max_queued=settings.max_queued,
    )
    async with sandbox:
        app.state.sandbox = sandbox
        yield
