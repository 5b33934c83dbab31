"""All features of the service, in the order in which their lifespans begin."""

from __future__ import annotations

from cdmpp_server import routes
from cdmpp_server.adapt.openapi import describe_adapt
from cdmpp_server.adapt.routes import lifespan as adapt_lifespan
from cdmpp_server.adapt.routes import router as adapt_router
from cdmpp_server.curve.openapi import describe_curve
from cdmpp_server.curve.routes import router as curve_router
from cdmpp_server.drift.feature import handlers as drift_handlers
from cdmpp_server.drift.feature import lifespan as drift_lifespan
from cdmpp_server.feature import Feature
from cdmpp_server.jobs.routes import describe as describe_jobs
from cdmpp_server.jobs.routes import lifespan as jobs_lifespan
from cdmpp_server.jobs.routes import router as jobs_router
from cdmpp_server.llm.openapi import describe_llm
from cdmpp_server.llm.routes import router as llm_router
from cdmpp_server.observe.listing import describe as describe_listing
from cdmpp_server.observe.listing import router as listing_router
from cdmpp_server.observe.routes import describe as describe_observe
from cdmpp_server.observe.routes import lifespan as observe_lifespan
from cdmpp_server.observe.routes import router as observe_router
from cdmpp_server.onnx.openapi import describe_onnx
from cdmpp_server.onnx.routes import router as onnx_router
from cdmpp_server.operate.connections import lifespan as connections_lifespan
from cdmpp_server.operate.middleware import install as install_middleware
from cdmpp_server.operate.routes import describe as describe_operate
from cdmpp_server.operate.routes import lifespan as operate_lifespan
from cdmpp_server.operate.routes import router as operate_router
from cdmpp_server.page.routes import router as page_router
from cdmpp_server.plan.openapi import describe_plan
from cdmpp_server.plan.routes import lifespan as plan_lifespan
from cdmpp_server.plan.routes import router as plan_router
from cdmpp_server.predict.openapi import describe_predict
from cdmpp_server.predict.routes import lifespan as predict_lifespan
from cdmpp_server.predict.routes import router as predict_router
from cdmpp_server.reload.routes import describe as describe_reload
from cdmpp_server.reload.routes import install as reload_install
from cdmpp_server.reload.routes import lifespan as reload_lifespan
from cdmpp_server.sandbox.feature import lifespan as sandbox_lifespan

FEATURES: tuple[Feature, ...] = (
    Feature(lifespan=connections_lifespan),
    Feature(lifespan=sandbox_lifespan),
    # Before predictions, which read registered programs from its database.
    Feature(observe_router, describe_observe, lifespan=observe_lifespan),
    Feature(listing_router, describe_listing),
    Feature(predict_router, describe_predict, lifespan=predict_lifespan),
    Feature(None, describe_reload, reload_install, reload_lifespan),
    Feature(adapt_router, describe_adapt, lifespan=adapt_lifespan),
    Feature(curve_router, describe_curve),
    Feature(llm_router, describe_llm),
    Feature(onnx_router, describe_onnx),
    Feature(plan_router, describe_plan, lifespan=plan_lifespan),
    # Before the runners of jobs, which execute them.
    Feature(lifespan=drift_handlers),
    Feature(jobs_router, describe_jobs, lifespan=jobs_lifespan),
    Feature(lifespan=drift_lifespan),
    Feature(routes.router, routes.describe),
    Feature(page_router),
    # Last: its descriptions apply to all endpoints, and its middleware is outermost.
    Feature(operate_router, describe_operate, install_middleware, operate_lifespan),
)
