"""Fused pipeline schedules (RLHFuse): several models train at once on the same ranks, in both directions.

:mod:`problem` defines the tasks, :mod:`bound` a lower bound of the makespan, :mod:`list_scheduling` the compiled
list scheduler, :mod:`search` the search over its priorities, and :mod:`check` verifies a plan independently.
"""

from cdmpp.plan.fused.list_scheduling import lower_bound_s
from cdmpp.plan.fused.problem import Model, Problem
from cdmpp.plan.fused.search import FusedSearchResult, search

__all__ = ["FusedSearchResult", "Model", "Problem", "lower_bound_s", "search"]
