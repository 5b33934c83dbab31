"""Rule of PyTorch's calls on lists of tensors, which its optimizers make on GPUs.

A launch takes a limited number of tensors and of blocks of 65,536 elements (ATen/native/cuda/MultiTensorApply.cuh), so
that a call on a large network is many launches.
"""

from __future__ import annotations

import math

from cdmpp.programs.frontends.eager_rules import Call, Fields, Outcome, is_tensor, size_bytes
from cdmpp.programs.operators import DTYPE_BYTES

#: Elements of a block, blocks of a launch, and tensors of a launch by the number of lists.
CHUNK, BLOCKS = 65_536, 320
TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
#: Columns of the operator that stands for a launch.
COLUMNS = 4096


def foreach(call: Call) -> Outcome:
    """Element-wise passes over lists of tensors: every list is read, the result is written."""
    lists = [value for value in call.args if isinstance(value, list | tuple) and value and is_tensor(value[0])]
    if not lists or lists[0][0].device.type == "cpu":  # step counters are on the host
        return Outcome()
    results = lists[0] if call.name.endswith("_") else call.results
    written = [] if call.name.endswith("_") or not results else [results]
    groups = list(zip(*lists, *written, strict=False))
    most = TENSORS.get(len(lists) + len(written), min(TENSORS.values()))
    launches: list[Fields] = []
    moved, tensors, blocks = 0.0, 0, 0
    for group in groups:
        # Written in place, the first tensor of a group moves twice.
        bytes_moved = sum(map(size_bytes, group)) + (0 if written else size_bytes(group[0]))
        remaining = elements = group[0].numel()
        tensors += 1
        while remaining:
            taken = min(remaining, (BLOCKS - blocks) * CHUNK)
            moved += bytes_moved * taken / elements
            blocks += -(-taken // CHUNK)
            remaining -= taken
            if blocks == BLOCKS or (tensors == most and not remaining):
                launches.append(_pass(moved))
                # The remainder of a tensor counts as one of the next launch.
                moved, tensors, blocks = 0.0, int(remaining > 0), 0
    if moved:
        launches.append(_pass(moved))
    return Outcome(tuple(launches), "a pass over lists of tensors as relu: the same bytes moved")


def _pass(moved: float) -> Fields:
    """A launch by its bytes, in rows of :data:`COLUMNS`: neither shapes nor types of the tensors matter to it."""
    elements = max(math.ceil(moved / (2 * DTYPE_BYTES["float32"])), 1)
    cols = min(COLUMNS, elements)
    return {"operator": "relu", "dtype": "float32", "rows": -(-elements // cols), "cols": cols}
