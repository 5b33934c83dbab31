"""The shipped lowered structures: complete, and what TVM makes of the operators now."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cdmpp.errors import UnsupportedOperatorError
from cdmpp.programs.operators import lowered_operators, structural_flags
from cdmpp.programs.templates import _shipped, all_classes, class_name, partition, size_names, template_json
from cdmpp.programs.tvm_json import load, prim_funcs
from tests.features.shapes import random_specs


def test_every_class_is_shipped_and_no_other() -> None:
    wanted = {class_name(*c) for c in all_classes()}
    assert wanted == set(_shipped())
    assert {name.split(":")[0] for name in wanted} == set(lowered_operators())


@pytest.mark.tvm
def test_the_shipped_templates_equal_tvm_output() -> None:
    pytest.importorskip("tvm")
    from cdmpp.programs.lowering import lower_class, to_json
    from cdmpp.programs.make_templates import prune

    stale = [
        class_name(operator, dtype, flags)
        for operator, dtype, flags in all_classes()
        if json.loads(prune(to_json(lower_class(operator, dtype, flags, size_names(operator)))))
        != json.loads(template_json(class_name(operator, dtype, flags)))
    ]
    assert not stale, "run: python -m cdmpp.programs.make_templates (and retrain)"


def test_a_template_is_one_function_whose_symbols_are_sizes() -> None:
    for name in ("linear:float16:bias=True", "softmax:float32"):
        nodes, root = load(template_json(name))
        assert len(prim_funcs(nodes, root)) == 1
        texts = {str(n.get("data")) for n in nodes.values() if n["type"] == "ffi.String"}
        assert set(size_names(name.split(":")[0])) <= texts


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(UnsupportedOperatorError, match="complex64"):
        template_json("linear:complex64:bias=False")


def test_every_specification_has_a_template() -> None:
    for spec in random_specs(500, 5):
        template_json(spec.structural_class())


def test_partition_of_arrays_equals_structural_flags_of_each() -> None:
    by_operator: dict[tuple[str, ...], list[dict[str, int]]] = {}
    for spec in random_specs(600, 8):
        key = (spec.operator, *(str(getattr(spec, f)) for f in type(spec).structural_fields))
        by_operator.setdefault(key, []).append(spec.model_dump())
    for (operator, *_), members in by_operator.items():
        kind = lowered_operators()[operator]
        fixed = {name: members[0][name] for name in kind.structural_fields}
        names = [n for n in size_names(operator) if n not in fixed]
        sizes = {name: np.array([m[name] for m in members]) for name in names}
        result: dict[int, dict[str, object]] = {}
        for flags, rows in partition(operator, fixed, sizes):
            result |= dict.fromkeys(rows.tolist(), flags)
        assert [result[i] for i in range(len(members))] == [structural_flags(operator, m) for m in members]
