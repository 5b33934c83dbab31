"""Pipeline step emulator (SEMU): step time, bubbles and peak memory of pipeline-parallel training.

An :class:`Emulator` simulates steps and caches the parts of earlier ones.
:mod:`cdmpp.simulate.emulator.schema` has the request and the plan (docs/pipelines.md).
"""

from cdmpp.simulate.emulator.emulate import EmulatedStep, Emulator
from cdmpp.simulate.emulator.orders import SCHEDULES, Pass
from cdmpp.simulate.emulator.stages import PassCost, Stage

__all__ = ["SCHEDULES", "EmulatedStep", "Emulator", "Pass", "PassCost", "Stage"]
