"""From networks to measured tensor programs: sample schedules, build them, time them, keep what was found.

One room a step: :mod:`~cdmpp.measure.targets` says on what, :mod:`~cdmpp.measure.sampling` which programs,
:mod:`~cdmpp.measure.building` and :mod:`~cdmpp.measure.timing` do the work inside the processes of
:mod:`~cdmpp.measure.pools`, :mod:`~cdmpp.measure.store` keeps every step on disk, and
:mod:`~cdmpp.measure.collect` decides what comes next. TVM is imported in worker processes only.
"""
