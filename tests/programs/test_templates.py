"""The shipped lowered structures: complete, and what TVM makes of the operators now."""

import numpy as np
import pytest

from cdmpp.errors import UnsupportedOperatorError
from cdmpp.features.encode import encode_operator, encode_tvm_json
from cdmpp.programs.operators import OperatorSpec, lowered_operators, read_value, structural_flags
from cdmpp.programs.templates import (
    _shipped,
    all_classes,
    class_name,
    is_class,
    partition,
    size_names,
    stored_class,
    symbols,
    template_json,
)
from cdmpp.programs.tvm_json import load, prim_funcs
from tests.features.shapes import random_specs, reads_only_padding


def stored(operator: str, dtype: str, flags: dict[str, object]) -> str:
    own_dtype, own, _ = stored_class(operator, dtype, flags)
    return class_name(operator, own_dtype, own)


def test_every_class_has_a_template_and_none_is_left_over() -> None:
    assert {stored(*c) for c in all_classes()} == set(_shipped())
    assert {operator for operator, _, _ in all_classes()} == set(lowered_operators())


@pytest.mark.slow
@pytest.mark.tvm
def test_the_shipped_templates_equal_tvm_output() -> None:
    from cdmpp.programs.lowering import lower_class, to_json
    from cdmpp.programs.make_templates import prune

    stale = []
    for name in _shipped():
        operator, dtype, *texts = name.split(":")
        flags = {key: read_value(value) for key, _, value in (text.partition("=") for text in texts)}
        if prune(to_json(lower_class(operator, dtype, flags, list(symbols(operator))))) != _shipped()[name]:
            stale.append(name)
    assert not stale, "run: python -m cdmpp.programs.make_templates (and retrain)"


@pytest.mark.slow
@pytest.mark.tvm
def test_a_shared_template_gives_the_features_of_each_class_own_lowering() -> None:
    from cdmpp.programs.lowering import lower, to_json

    shared = [s for s in random_specs(900, 11) if stored_name_differs(s)]
    assert len({s.operator for s in shared}) > 30
    for spec in shared[::5]:
        if reads_only_padding(spec):
            continue
        own, template = encode_tvm_json(to_json(lower(spec))), encode_operator(spec)
        np.testing.assert_allclose(own.leaves, template.leaves, rtol=1e-5, atol=1e-5, err_msg=spec.text())
        np.testing.assert_allclose(own.totals[:, 1:3], template.totals[:, 1:3], err_msg=spec.text())


def stored_name_differs(spec: OperatorSpec) -> bool:
    return spec.structural_class() not in _shipped()


def test_a_template_is_one_function_whose_symbols_are_sizes() -> None:
    for name in ("linear:float16:bias=True", "softmax:float32"):
        nodes, root = load(template_json(name))
        assert len(prim_funcs(nodes, root)) == 1
        texts = {str(n.get("data")) for n in nodes.values() if n["type"] == "ffi.String"}
        assert set(size_names(name.split(":")[0])) <= texts


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(UnsupportedOperatorError, match="complex64"):
        template_json("linear:complex64:bias=False")
    for name in ("linear", "linear:float32", "linear:float32:bias", "linear:float32:bias=False:balance=none", ":::"):
        assert not is_class(name)


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
