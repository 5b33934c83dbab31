"""Fused pipelines (RLHFuse): several models trained at once on the same ranks, in both directions.

:mod:`problem` says what is scheduled, :mod:`bound` how good it can be, :mod:`construct` makes one schedule,
:mod:`explore` the best of many, :mod:`check` believes none of them.
"""

from cdmpp.planning.fused.bound import lower_bound_s
from cdmpp.planning.fused.explore import Found, search
from cdmpp.planning.fused.problem import Model, Problem

__all__ = ["Found", "Model", "Problem", "lower_bound_s", "search"]
