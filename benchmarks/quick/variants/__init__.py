"""Variants: one short file each, with a ``VARIANT`` of :class:`benchmarks.quick.variant.QuickVariant`."""
