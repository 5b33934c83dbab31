"""Collective operations of aiconfigurator, pipeweave and Frontier: all-reduce, all-gather, reduce-scatter, all-to-all,
send and receive.

``message_bytes`` is the larger buffer of one rank. ``library`` is the software (PyTorch's NCCL backend and nccl-tests
are both NCCL), ``mode`` what was timed: ``kernel`` is the profiler's kernel time, ``graph`` a CUDA graph, ``eager``
framework calls with their launch cost and a copy of the input; the benchmark programs (nccl-tests, oneCCL) time calls
from the host back to back, so they are ``eager`` of their library. ``link`` names the connection inside a node; where
the source states none, or a guess by the node's name, the device's own is meant. ``ranks_per_node`` -1 is not stated.
``kernel_source``, ``version``, ``table``, ``n_rep`` and ``std_us`` are never read.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, column_set, combinations
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable
from cdmpp.data.table import Flags
from cdmpp.devices.links import canonical_link
from cdmpp.programs.collectives import COLLECTIVES, LIBRARIES, MAX_RANKS

_LIBRARIES = {"torch.distributed (nccl)": "nccl", "torch.distributed (gloo)": "gloo"}
_MODES = {
    **{"kernel": "kernel", "graph": "graph", "eager": "eager"},
    **dict.fromkeys(("nccl-tests", "rccl-tests", "oneccl-benchmark"), "eager"),
}


def _library(name: str) -> str | None:
    plain = name.strip().casefold()
    plain = _LIBRARIES.get(plain, plain)
    return plain if plain in LIBRARIES else None


def _link(name: str) -> str | None:
    try:
        return canonical_link(name)
    except ValueError:
        return None


def _mode(raw: RawTable) -> Labels:
    """Protocol of each row: its mode."""
    return raw.labels("mode", "kernel").map(lambda name: _MODES.get(name, name or "kernel"))


def _groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    """Rows of one operator that share library, mode, link and ranks of a node."""
    sizes = {"bytes": raw.ints("message_bytes"), "ranks": raw.ints("ranks")}
    per_node = raw.ints("ranks_per_node")
    unstated = per_node.missing | per_node.invalid | (per_node.values > MAX_RANKS) | (per_node.values < 1)
    stated = Labels.of("" if none else str(ranks) for none, ranks in zip(unstated, per_node.values, strict=True))
    columns = (op, raw.labels("library"), _mode(raw), raw.labels("link"), stated)
    for rows, (name, library, mode, link, ranks) in combinations(*columns):
        if name in COLLECTIVES:
            flags: Flags = {
                "ranks_per_node": int(ranks) if ranks else None,
                "library": _library(library),
                "mode": mode if mode in _MODES.values() else None,
                "link": _link(link),
            }
            yield Group(name, rows, sizes, flags)


IMPORTER = Importer(
    name="comm_collectives",
    file_name="comm_collectives.parquet",
    repository="ai-dynamo/aiconfigurator, zksainx/pipeweave, NetX-lab/Frontier",
    commit="095f58a5, 55e03178, a4b22df8",
    origin="comm/, dataset/collective, data/profiling/network",
    licence="Apache-2.0, Apache-2.0, MIT",
    protocol="kernel",
    protocol_of=_mode,
    needs=column_set("op device message_bytes ranks"),
    lacks=column_set("m n k batch rows q_len c_in program"),
    reads=column_set("dtype library mode link ranks_per_node"),
    groups=_groups,
    dtype=lambda raw: raw.labels("dtype", "float16"),
)
