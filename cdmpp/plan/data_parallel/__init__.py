"""One iteration of data-parallel training at several bucket sizes (PyTorch DDP)."""
