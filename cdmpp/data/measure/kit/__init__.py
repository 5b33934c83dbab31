"""Measuring kit for a borrowed GPU: parts of a job travel there, and results come back as small files.

:mod:`~cdmpp.data.measure.kit.parts` has the files, :mod:`~cdmpp.data.measure.kit.export_programs` and
:mod:`~cdmpp.data.measure.kit.export_library` make the parts, and :mod:`~cdmpp.data.measure.kit.import_results` turns
results into records. :mod:`cdmpp.data.measure.runtime` is copied beside the parts and runs on the GPU machine;
it imports nothing from cdmpp.
"""
