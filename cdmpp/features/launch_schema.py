"""Names of the columns of a leaf in a GPU program, and what a warp is: readable without the walk."""

from __future__ import annotations

#: Threads that execute one instruction together, bytes of a sector of global memory, banks of shared memory, bytes of
#: a word of a bank.
WARP, SECTOR_BYTES, BANKS, WORD_BYTES = 32, 32, 32, 4

#: Of the launch, equal in all leaves of a kernel.
LAUNCH = ("kernel", "blocks", "threads", "vthreads", "local_words", "shared_bytes", "unroll_limit", "async_stages")
#: Of a leaf, per thread (instructions) or per warp (sectors, cycles), over all trips.
LEAF = (
    *("trips", "float_ops", "int_ops", "slow_ops", "tensor_ops", "index_ops", "loop_steps", "global_loads"),
    *("global_load_sectors", "global_load_bytes", "global_stores", "global_store_sectors", "shared_loads"),
    *("shared_load_cycles", "shared_stores", "shared_store_cycles", "barriers", "spilled_words", "accumulators"),
    *("straight_body", "global_vector_bytes", "shared_vector_bytes", "footprint_bytes"),
)
#: Shares from 0 to 1.
GPU_FLAGS = ("active_lanes", "lane_use", "reduces", "overhang")
GPU_COLUMNS: tuple[str, ...] = (*LAUNCH, *LEAF, *GPU_FLAGS)
GPU_WIDTH = len(GPU_COLUMNS)
