"""All rooms of the service, in the order in which they are opened."""

from __future__ import annotations

from server import routes
from server.adapt.openapi import describe_adapt
from server.adapt.routes import router as adapt_router
from server.predict.openapi import describe_predict
from server.predict.routes import opened as predict_opened
from server.predict.routes import router as predict_router
from server.room import Room
from server.sandbox.room import opened as sandbox_opened

ROOMS: tuple[Room, ...] = (
    Room(opened=sandbox_opened),
    Room(predict_router, describe_predict, opened=predict_opened),
    Room(adapt_router, describe_adapt),
    Room(routes.router, routes.describe),
)
