"""The reference: the network of ``models/base`` with a tenth of its weights."""

from benchmarks.quick.variant import QuickVariant

VARIANT = QuickVariant()
