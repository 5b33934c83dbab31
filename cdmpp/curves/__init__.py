"""Latency over the sizes of a template: a grid of predictions and a monotone fit through them."""

from cdmpp.curves.curve import predict_curve
from cdmpp.curves.plan import CurvePlan
from cdmpp.curves.points import Curve, CurvePoint
from cdmpp.curves.template import MAX_POINTS, Template

__all__ = ["MAX_POINTS", "Curve", "CurvePlan", "CurvePoint", "Template", "predict_curve"]
