"""Measurements: records, importers of public tables, splits, physical checks, and measuring itself.

Modules are imported by name (``from cdmpp.data.load import load_table``), so that those who need only
:mod:`cdmpp.data.physics` do not pay for pyarrow. What learns from measurements belongs in :mod:`cdmpp.train`.
"""
