"""What a room of the service is: its endpoints, what they add to the schema, what they keep open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI

from cdmpp_server.settings import Settings

Schema = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """One part of the service.

    Attributes
    ----------
    router : APIRouter, optional
        Its endpoints.
    describe : callable, optional
        ``describe(document, schemas, settings)`` completes the OpenAPI document in place: bodies that
        routes read raw, problems. ``schemas`` are the document's components.
    install : callable, optional
        ``install(app, settings)`` when the application is made: middleware. The last room's is outermost.
    opened : callable, optional
        ``opened(app, settings)``: what is open while the application runs, as an async context manager.
        Rooms are opened in their order and closed in the reverse one.
    """

    router: APIRouter | None = None
    describe: Callable[[Schema, Schema, Settings], None] | None = None
    install: Callable[[FastAPI, Settings], None] | None = None
    lifespan: Callable[[FastAPI, Settings], AbstractAsyncContextManager[None]] | None = None
