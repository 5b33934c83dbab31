"""Pipeline step emulator (SEMU): step time, bubbles and peak memory of pipeline-parallel training.

:func:`simulate` answers once, an :class:`Emulator` remembers; :mod:`cdmpp.emulator.schema` is the request
around them, with programs to predict (docs/pipelines.md).
"""

from cdmpp.emulator.emulate import Emulator, Step, simulate
from cdmpp.emulator.orders import SCHEDULES, Pass
from cdmpp.emulator.stages import PassCost, Stage

__all__ = ["SCHEDULES", "Emulator", "Pass", "PassCost", "Stage", "Step", "simulate"]
