"""Collection of measured tensor programs: sample schedules of networks, build, time and store them.

:mod:`~cdmpp.measure.targets` defines the targets, :mod:`~cdmpp.measure.sampling` draws the programs.
:mod:`~cdmpp.measure.building` and :mod:`~cdmpp.measure.timing` run inside the worker processes of
:mod:`~cdmpp.measure.pools`. :mod:`~cdmpp.measure.store` saves every step on disk, and
:mod:`~cdmpp.measure.collect` schedules the steps. TVM is imported in worker processes only.
"""
