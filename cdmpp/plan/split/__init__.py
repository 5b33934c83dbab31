"""Split of layers into the stages of a pipeline.

:func:`split` finds the best contiguous stages, :func:`stage_costs` exports their costs for other schedule
simulators. :mod:`cdmpp.plan.split.schema` has the request and the plan (docs/pipelines.md).
"""

from cdmpp.plan.split.search import Layer, LayerTable, Rank, Split, SplitResult, split, stage_costs

__all__ = ["Layer", "LayerTable", "Rank", "Split", "SplitResult", "split", "stage_costs"]
