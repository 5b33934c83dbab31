"""Importing TVM in worker processes."""

from __future__ import annotations

import sys
from typing import Any


def import_tvm_alone() -> Any:
    """TVM without torch, which ``tvm_ffi`` would import if it could: seconds and 250 MB a worker."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: importing it fails
    import tvm

    return tvm
