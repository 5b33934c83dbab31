"""Which layers go into which stage of a pipeline.

:func:`split` finds the best contiguous stages, :func:`stage_costs` hands their costs to other people's
schedule simulators; :mod:`cdmpp.planning.split.schema` is the request around them (docs/pipelines.md).
"""

from cdmpp.planning.split.search import Found, split
from cdmpp.planning.split.stages import Split, stage_costs
from cdmpp.planning.split.table import Layer, LayerTable, Rank

__all__ = ["Found", "Layer", "LayerTable", "Rank", "Split", "split", "stage_costs"]
