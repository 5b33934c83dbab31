"""A feature of the service: endpoints, their part of the schema, and resources with a lifespan."""

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
    """One feature of the service.

    Attributes
    ----------
    router : APIRouter, optional
        The endpoints.
    describe : callable, optional
        ``describe(document, schemas, settings)`` adds bodies and problems to the OpenAPI document in place,
        because the routes read raw bodies. ``schemas`` are the document's components.
    install : callable, optional
        ``install(app, settings)`` adds middleware when the application is created. The middleware of the
        last feature is outermost.
    lifespan : callable, optional
        ``lifespan(app, settings)`` returns an async context manager that holds resources while the
        application runs. Features are entered in order and left in reverse order.
    """

    router: APIRouter | None = None
    describe: Callable[[Schema, Schema, Settings], None] | None = None
    install: Callable[[FastAPI, Settings], None] | None = None
    lifespan: Callable[[FastAPI, Settings], AbstractAsyncContextManager[None]] | None = None
