"""NeuSight: fp32 PyTorch operators, timed eagerly with CUDA events (the launch cost is inside).

============  =====================================================================
in the table  here
============  =====================================================================
``linear``    ``linear`` with ``bias``; ``batch`` leading rows fold into ``m``
``bmm``       ``bmm``: batch, m, n, k
``conv2d``    ``conv2d`` forward: n = batch, h = w = ``in_hw``, kh = kw = ``kernel_hw``,
              one ``stride`` and ``pad`` for both axes, no bias
other         vector operators of the same name on [rows, cols]
============  =====================================================================

``neusight_filter`` (the rows the authors keep) becomes ``row_filter``, for reports only. ``split``,
``torch_version``, ``kernel_name``, ``n_kernels`` and ``n_rep`` are never read.
"""

from __future__ import annotations

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, always, column_set
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable

VECTOR = (
    *("add", "sub", "mul", "div", "pow", "maximum", "minimum"),
    *("add_scalar", "mul_scalar", "div_scalar", "pow_scalar"),
    *("relu", "gelu", "tanh", "sigmoid", "silu", "exp", "sqrt", "softmax", "layernorm", "rmsnorm"),
)


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    batch, m, n, k = (raw.ints(name) for name in ("batch", "m", "n", "k"))
    # A dense layer has no batch of its own: [batch, m, k] -> n is the same call as [batch * m, k] -> n.
    folds = IntColumn(np.where(batch.missing, 1, batch.values), np.zeros_like(batch.missing), batch.invalid)
    rows, cols = raw.ints("rows"), raw.ints("cols")
    conv = {"n": batch, "c_in": raw.ints("c_in"), "c_out": raw.ints("c_out")}
    conv |= dict.fromkeys(("h", "w"), raw.ints("in_hw")) | dict.fromkeys(("kh", "kw"), raw.ints("kernel_hw"))
    for name in ("stride", "pad"):
        conv |= dict.fromkeys((f"{name}_h", f"{name}_w"), raw.ints(name))
    return [
        Group("linear", op.is_("linear"), {"m": m.times(folds), "n": n, "k": k}, {"bias": True}),
        Group("bmm", op.is_("bmm"), {"batch": batch, "m": m, "n": n, "k": k}),
        Group("conv2d", op.is_("conv2d"), conv),
        *(Group(name, op.is_(name), {"rows": rows, "cols": cols}) for name in VECTOR if name in op.names),
    ]


IMPORTER = Importer(
    name="neusight",
    file_name="ops_neusight.parquet",
    repository="sitar-lab/NeuSight",
    commit="6945927",
    origin="scripts/asplos/data/dataset*/{train,test}",
    licence="MIT",
    protocol="eager",
    needs=column_set("op device dtype"),
    one_of=(column_set("batch m n k"), column_set("rows cols"), column_set("in_hw kernel_hw")),
    lacks=column_set("framework precision q_len direction family trans_a protocol"),
    reads=column_set("c_in c_out stride pad"),
    groups=_groups,
    framework=always("pytorch"),
    row_filter="neusight_filter",
)
