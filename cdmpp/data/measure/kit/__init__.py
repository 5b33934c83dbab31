"""Measuring kit for a borrowed GPU: parts of a job travel there, and results come back as small files.

:mod:`~cdmpp.data.measure.kit.content` has the standard job, :mod:`~cdmpp.data.measure.kit.export_programs` builds it,
:mod:`~cdmpp.data.measure.kit.parts` has the files, and :mod:`~cdmpp.data.measure.kit.import_results` turns results into
records. :mod:`cdmpp.data.measure.runtime` is copied beside the parts and runs on the GPU machine; it imports nothing
from cdmpp.
"""
