"""Sweeps of a language model over devices, parallel layouts, batches and precisions under goals of cost and latency."""

from cdmpp.plan.sweep.points import SweepPoint, evaluate_point, sweep_points
from cdmpp.plan.sweep.request import Sweep, read_sweep
from cdmpp.plan.sweep.result import SweepResult

__all__ = ["Sweep", "SweepPoint", "SweepResult", "evaluate_point", "read_sweep", "sweep_points"]
