"""Sweeps of a language model over devices, parallel layouts, batches and precisions under goals of cost and latency."""

from cdmpp.plan.sweep.points import Sweep, SweepPoint, SweepResult, evaluate_point, read_sweep, sweep_points

__all__ = ["Sweep", "SweepPoint", "SweepResult", "evaluate_point", "read_sweep", "sweep_points"]
