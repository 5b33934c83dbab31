"""Latency over the sizes of a template: a grid of predictions and a monotone fit through them."""

from cdmpp.predict.curves.plan import CurvePlan, predict_curve
from cdmpp.predict.curves.points import Curve, CurvePoint
from cdmpp.predict.curves.template import MAX_POINTS, Template

__all__ = ["MAX_POINTS", "Curve", "CurvePlan", "CurvePoint", "Template", "predict_curve"]
