"""Leaf vectors back in their own units, so that tests can speak of trips and bytes."""

from typing import Any

import numpy as np

from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.schema import COLUMNS, LINEAR

#: Values of a leaf without loops of a kind: empty products.
NEUTRAL: dict[str, float] = {
    **dict.fromkeys(("spatial_trips", "reduce_trips", "vectorized", "unrolled", "parallel"), 1),
    **dict.fromkeys(("blocks", "threads", "vthreads"), 1),
    **{f"spatial_{i}": 1 for i in range(4)},
    **{f"reduce_{i}": 1 for i in range(3)},
}


def unscaled(vector: np.ndarray[Any, Any]) -> dict[str, float]:
    """Columns of one leaf as they were before sign(x) * log2(1 + |x|)."""
    values = vector.astype(np.float64)
    return {
        name: float(value if name in LINEAR else np.copysign(np.exp2(abs(value)) - 1, value))
        for name, value in zip(COLUMNS, values, strict=True)
    }


def raw_leaves(encoded: EncodedPrograms) -> list[dict[str, float]]:
    """:func:`unscaled` of every leaf of the only program."""
    return [unscaled(leaf) for leaf in encoded.leaves[0]]


def assert_leaf(found: dict[str, float], expected: dict[str, float]) -> None:
    """Every column: those not named are neutral, or zero. Float32 keeps log2 to about 1e-6."""
    whole = dict.fromkeys(COLUMNS, 0.0) | NEUTRAL | expected
    assert set(whole) == set(COLUMNS)
    wrong = {
        name: (found[name], value)
        for name, value in whole.items()
        if abs(found[name] - value) > 1e-5 * max(1.0, abs(value))
    }
    assert not wrong, f"column: (found, expected by hand): {wrong}"
