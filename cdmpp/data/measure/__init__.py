"""Collection of measured tensor programs: sample schedules of networks, build, time and store them.

:mod:`~cdmpp.data.measure.targets` defines the targets, :mod:`~cdmpp.data.measure.sampling` draws the programs.
:mod:`~cdmpp.data.measure.building` and :mod:`~cdmpp.data.measure.timing` run inside the worker processes of
:mod:`~cdmpp.data.measure.pools`. :mod:`~cdmpp.data.measure.store` saves every step on disk, and
:mod:`~cdmpp.data.measure.collect` schedules the steps. TVM is imported in worker processes only.
"""
