"""Small tables in the public layouts and as project records, written by the tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

Columns = dict[str, list[Any]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("CDMPP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def vidur_columns() -> Columns:
    """Layers on an A40 and an A100, repeated shapes among them."""
    rng = np.random.default_rng(1)
    n = 40
    op = rng.choice(["linear", "rmsnorm", "silu_and_mul", "add"], n).tolist()
    return {
        "op": op,
        "model": ["meta-llama/Llama-2-7b-hf"] * n,
        "device": rng.choice(["NVIDIA A40", "NVIDIA A100 80GB (vidur)"], n).tolist(),
        "m": (2 ** rng.integers(0, 12, n)).tolist(),
        "n": rng.choice([4096, 11008, 5120], n).tolist(),
        "k": [4096 if name == "linear" else None for name in op],
        "latency_us": rng.lognormal(4.0, 1.0, n).tolist(),
        "dtype": ["float16"] * n,
    }


def attention_columns() -> Columns:
    """Programs of many leaves, two frameworks."""
    rng = np.random.default_rng(2)
    n = 30
    op = rng.choice(["attention_prefill", "attention_decode", "attention_encoder"], n)
    decode = op == "attention_decode"
    length = 2 ** rng.integers(5, 11, n)
    return {
        "op": op.tolist(),
        "device": rng.choice(["NVIDIA L40S", "NVIDIA GB200"], n).tolist(),
        "framework": rng.choice(["vllm", "trtllm"], n).tolist(),
        "dtype": ["bfloat16"] * n,
        "batch": (2 ** rng.integers(0, 5, n)).tolist(),
        "q_len": np.where(decode, 1, length).tolist(),
        "past_len": np.where(decode, length, 0).tolist(),
        "heads": [32] * n,
        "kv_heads": rng.choice([1, 8, 32], n).tolist(),
        "head_dim": [128] * n,
        "latency_us": rng.lognormal(4.0, 1.0, n).tolist(),
    }


@pytest.fixture(params=[vidur_columns, attention_columns])
def columns(request: pytest.FixtureRequest) -> Columns:
    """Columns of one raw table."""
    found: Columns = request.param()
    return found


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write columns as Parquet."""

    def write(columns: Columns, name: str = "table.parquet") -> Path:
        pq.write_table(pa.table(columns), tmp_path / name)
        return tmp_path / name

    return write
