"""Which gradients to compress before their exchange, and on which processor (ByteComp)."""
