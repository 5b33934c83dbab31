"""Sweeps of a language model over devices, parallel layouts, batches and precisions under goals of cost and latency."""

from cdmpp.plan.sweep.points import SweepPoint, SweepResult, evaluate_point, sweep_points
from cdmpp.plan.sweep.request import Sweep, read_sweep

__all__ = ["Sweep", "SweepPoint", "SweepResult", "evaluate_point", "read_sweep", "sweep_points"]
