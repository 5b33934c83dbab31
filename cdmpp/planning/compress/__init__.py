"""Which gradients to compress before their exchange, and where, after ByteComp."""
