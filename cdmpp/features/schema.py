"""Names, order and scaling of a leaf's computation vector: the versioned feature schema.

Every artifact carries :data:`SCHEMA_HASH`; a model and features of two schemas never meet. A column is
either a magnitude, stored as ``sign(x) * log2(1 + |x|)``, or a flag, stored as it is.
"""

from __future__ import annotations

import hashlib

from cdmpp.features.ast import OPERATIONS

SCHEMA_VERSION = 2

#: Maximum number of reads with separate columns, in the order of the expression.
READ_SLOTS = 3
SPATIAL_SLOTS = 4
REDUCE_SLOTS = 3
#: Types of the arithmetic, in cdmpp's spelling; TVM adds a suffix to the 8- and 4-bit floats (float8_e4m3fn).
COMPUTE_DTYPES = ("float32", "float16", "bfloat16", "int8", "float64", "float8_e4m3", "float4_e2m1", "int4")
SCOPES = ("global", "shared", "local")

_ACCESS = ("touched_bytes", "unique_bytes", "reuse", "stride", "run_bytes", "element_bytes")
_ACCESS_FLAGS = ("is_parameter", *(f"scope_{s}" for s in SCOPES))


def _access(slot: str) -> tuple[str, ...]:
    return (*(f"{slot}_{n}" for n in _ACCESS), *(f"{slot}_{n}" for n in _ACCESS_FLAGS))


#: Group -> column names. What each means stands in docs/features.md.
GROUPS: dict[str, tuple[str, ...]] = {
    "arithmetic": OPERATIONS,
    "loops": (
        *("trips", "spatial_trips", "reduce_trips", "loop_count", "inner_extent"),
        *("vectorized", "unrolled", "parallel", "unroll_step"),
        *(f"spatial_{i}" for i in range(SPATIAL_SLOTS)),
        *(f"reduce_{i}" for i in range(REDUCE_SLOTS)),
    ),
    "threads": ("is_gpu", "blocks", "threads", "vthreads"),
    "contraction": (
        *("is_contraction", "contraction_batch", "contraction_m", "contraction_n"),
        *("contraction_k", "align_m", "align_n", "align_k"),
    ),
    "store": (*_access("store"), "store_also_read", "store_buffer_bytes"),
    **{f"read_{i}": _access(f"read_{i}") for i in range(READ_SLOTS)},
    "totals": (
        *("flops", "leaf_bytes", "intensity", "other_reads", "indirect", "predicated", "is_init", "intrinsic"),
        *(f"computes_{d}" for d in COMPUTE_DTYPES),
    ),
}

COLUMNS: tuple[str, ...] = tuple(name for group in GROUPS.values() for name in group)
COLUMN: dict[str, int] = {name: i for i, name in enumerate(COLUMNS)}
WIDTH = len(COLUMNS)

_COUNTS = frozenset(
    {"predicated", "intrinsic", "indirect", "store_also_read", "loop_count", "other_reads", "intensity"}
)

#: Columns that are not magnitudes: flags and small counts, kept linear.
LINEAR: frozenset[str] = frozenset(
    name
    for name in COLUMNS
    if name.startswith(("is_", "align_", "computes_"))
    or name in _COUNTS
    or "_scope_" in name
    or name.endswith("is_parameter")
)

SCHEMA_HASH = hashlib.sha256(f"{SCHEMA_VERSION}\n{','.join(COLUMNS)}\n{','.join(sorted(LINEAR))}".encode()).hexdigest()[
    :16
]
