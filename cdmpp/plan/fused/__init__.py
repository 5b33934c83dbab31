"""Fused pipeline schedules (RLHFuse): several models train at once on the same ranks, in both directions.

:mod:`problem` defines the tasks, :mod:`list_scheduling` the compiled list scheduler, the baselines and the lower
bound, :mod:`solver` the search over priorities, and :mod:`check` verifies a plan independently.
"""

from cdmpp.plan.fused.list_scheduling import lower_bound_s
from cdmpp.plan.fused.problem import FusedProblem, Model
from cdmpp.plan.fused.solver import FusedSearchResult, search

__all__ = ["FusedProblem", "FusedSearchResult", "Model", "lower_bound_s", "search"]
