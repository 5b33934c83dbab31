"""MIOpen's find-db: the fastest solver of a convolution on AMD GPUs (kernel time, no launch cost).

Every row is ``conv2d`` with its ``direction``, written as the forward problem; sizes keep their names, no
bias. ``best_solver`` and ``n_solvers`` are never read. The source holds rows of up to 180 s: see
:mod:`cdmpp.data.physics` for the rule that leaves such rows out of training.
"""

from __future__ import annotations

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, always
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable

_SIZES = (
    "n",
    "c_in",
    "h",
    "w",
    "c_out",
    "kh",
    "kw",
    "pad_h",
    "pad_w",
    "stride_h",
    "stride_w",
    "dil_h",
    "dil_w",
    "groups",
)
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    sizes = {name: raw.ints(name) for name in _SIZES}
    direction = raw.labels("direction")
    conv = op.is_("conv2d")
    return [Group("conv2d", conv & direction.is_(d), sizes, {"direction": d}) for d in DIRECTIONS]


IMPORTER = Importer(
    name="miopen",
    file_name="ops_miopen_conv2d.parquet",
    repository="ROCm/MIOpen",
    commit="2d1fd997",
    origin="src/kernels/*.HIP.fdb.txt.bz2",
    licence="MIT",
    protocol="kernel",
    needs=frozenset({"op", "device", "dtype", "direction", *_SIZES}),
    lacks=frozenset({"precision"}),
    groups=_groups,
    framework=always("miopen"),
)
