"""Measurement records: the columnar table, the importers of public tables, splits and physics checks.

Modules are imported by name (``from cdmpp.data.load import load_table``), so that those who need only
:mod:`cdmpp.data.physics` do not pay for pyarrow.
"""
