"""Layout, buckets of gradients and compression of a training step of a language model."""
