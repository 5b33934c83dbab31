"""Measuring kit for a borrowed GPU: parts of a job travel there, and results come back as small files.

:mod:`~cdmpp.data.measure.kit.parts` writes part files, :mod:`~cdmpp.data.measure.kit.export_programs` makes those of
TVM programs, and :mod:`~cdmpp.data.measure.kit.import_results` turns results into records. The folder ``runtime`` is
copied beside the parts and runs on the GPU machine; it imports nothing from cdmpp.
"""
