"""All rooms of the service, in the order in which they are opened."""

from __future__ import annotations

from server import routes
from server.adapt.openapi import describe_adapt
from server.adapt.routes import router as adapt_router
from server.curve.openapi import describe_curve
from server.curve.routes import router as curve_router
from server.jobs.routes import describe as describe_jobs
from server.jobs.routes import opened as jobs_opened
from server.jobs.routes import router as jobs_router
from server.observe.routes import describe as describe_observe
from server.observe.routes import opened as observe_opened
from server.observe.routes import router as observe_router
from server.onnx.openapi import describe_onnx
from server.onnx.routes import router as onnx_router
from server.operate.routes import describe as describe_operate
from server.operate.routes import opened as operate_opened
from server.operate.routes import router as operate_router
from server.operate.surround import install as install_surround
from server.page.routes import router as page_router
from server.plan.openapi import describe_plan
from server.plan.routes import opened as plan_opened
from server.plan.routes import router as plan_router
from server.predict.openapi import describe_predict
from server.predict.routes import opened as predict_opened
from server.predict.routes import router as predict_router
from server.reload.routes import describe as describe_reload
from server.reload.routes import install as reload_install
from server.reload.routes import opened as reload_opened
from server.room import Room
from server.sandbox.room import opened as sandbox_opened

ROOMS: tuple[Room, ...] = (
    Room(opened=sandbox_opened),
    # Before predictions: registered programs are in its database.
    Room(observe_router, describe_observe, opened=observe_opened),
    Room(predict_router, describe_predict, opened=predict_opened),
    Room(None, describe_reload, reload_install, reload_opened),
    Room(adapt_router, describe_adapt),
    Room(curve_router, describe_curve),
    Room(onnx_router, describe_onnx),
    Room(plan_router, describe_plan, opened=plan_opened),
    Room(jobs_router, describe_jobs, opened=jobs_opened),
    Room(routes.router, routes.describe),
    Room(page_router),
    # It describes what holds for all of them, and stands around them.
    Room(operate_router, describe_operate, install_surround, operate_opened),
)
