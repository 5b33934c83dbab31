"""Latency over the sizes of a template: a grid of predictions and a monotone fit through them."""

from cdmpp.curves.curve import Curve, CurvePoint, predict_curve
from cdmpp.curves.template import MAX_POINTS, Template

__all__ = ["MAX_POINTS", "Curve", "CurvePoint", "Template", "predict_curve"]
