"""Formats by planner, their options, and fields that a caller adds."""

from pathlib import Path
from typing import Any

import pytest

from cdmpp import make_plan
from cdmpp.errors import DataError, FieldError
from cdmpp.plan.formats import FORMATS, Exported, export_plan, import_request, write_export
from cdmpp.plan.formats.registry import merge
from cdmpp.plan.formats.text import options, overrides
from cdmpp.plan.registry import PLANNERS

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
STEP: dict[str, Any] = {"stages": [{"forward_s": 1.0, "backward_s": 2.0}], "micro_batches": 2}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_planners_that_exist(name: str) -> None:
    directions = [cls for cls in (FORMATS[name].exporter(), FORMATS[name].importer()) if cls is not None]
    assert directions
    for cls in directions:
        assert cls.kinds and set(cls.kinds) <= set(PLANNERS)
        assert all(field.description for field in cls.model_fields.values()), "every option is described"


@pytest.mark.parametrize(
    ("file", "format", "kind", "options_"),
    [
        ("megatron.sh", "megatron", "split", {"device": "h100-sxm"}),
        ("megatron.sh", "megatron", "simulate", {"device": "h100-sxm"}),
        ("torchtitan.toml", "torchtitan", "split", {"device": "h100-sxm"}),
        ("torchtitan.toml", "torchtitan", "simulate", {"device": "h100-sxm"}),
        ("verl.yaml", "verl", "rl", {}),
    ],
)
def test_configurations_of_the_documentation_are_read(
    file: str, format: str, kind: str, options_: dict[str, Any]
) -> None:
    costs = {
        "lengths": {"quantiles": {"0.5": 100, "0.9": 300}},
        "decode": {"a_s": 0.01},
        "training": {"seconds_per_token": 1e-4},
    }
    text = (EXAMPLES / file).read_text()
    found = import_request(format, text, kind, fields=costs if kind == "rl" else None, **options_)
    PLANNERS[kind].read(found.request).check()
    assert not found.missing


def test_unknown_formats_list_those_of_the_planner() -> None:
    with pytest.raises(FieldError, match="no format is called 'nccl'") as caught:
        export_plan("nccl", "simulate", STEP, make_plan("simulate", STEP))
    assert caught.value.hint == "'simulate' has: torch-csv"
    with pytest.raises(FieldError, match="'ray' has no 'simulate' plans, only: rl, afd") as caught:
        export_plan("ray", "simulate", STEP, make_plan("simulate", STEP))
    assert caught.value.hint == "'simulate' has: torch-csv"
    with pytest.raises(FieldError, match="has no 'cluster' plans") as caught:
        import_request("verl", "", "cluster")
    assert caught.value.hint == "'cluster' has: no format"
    with pytest.raises(FieldError, match="no plan is called 'x'"):
        import_request("verl", "", "x")
    with pytest.raises(FieldError, match="the format 'megatron' has no 'split' plans, only: training"):
        export_plan("megatron", "split", {}, {})
    with pytest.raises(FieldError, match="the format 'megatron-layout' is written, not read"):
        import_request("megatron-layout", "", "split")


def test_unknown_and_wrong_options_list_those_of_the_format() -> None:
    with pytest.raises(FieldError, match="unknown option 'gpu'") as caught:
        import_request("megatron", "", "split", gpu="h100-sxm")
    assert caught.value.hint == "options of megatron: device, dp, vocab"
    with pytest.raises(FieldError, match="option device: missing"):
        import_request("megatron", "", "split")
    with pytest.raises(FieldError, match="option dp: "):
        import_request("megatron", "", "split", device="t4", dp=0)


def test_fields_of_the_caller_are_merged() -> None:
    request = {"a": 1, "b": {"c": 2}, "d": [{"e": 1}, {"e": 2}], "f": [1, 2]}
    fields = {"a": 5, "b": {"x": 3}, "d": {"g": 0}, "f": [3], "n": None}
    assert merge(request, fields) == {
        "a": 5,
        "b": {"c": 2, "x": 3},
        "d": [{"e": 1, "g": 0}, {"e": 2, "g": 0}],
        "f": [3],
        "n": None,
    }
    assert merge(request, {"d": [{"g": 1}, {"g": 2}]})["d"] == [{"e": 1, "g": 1}, {"e": 2, "g": 2}]
    with pytest.raises(FieldError, match="d: 1 items for the 2 of the file"):
        merge(request, {"d": [{"g": 1}]})


def test_shell_text_is_read() -> None:
    text = "A=1 # comment\nARGS=(--one $A --two=2 --flag\n --many 1 2)\nrun ${ARGS[@]} --last 'x y' --unset ${NO:-7}"
    assert options(text) == {"one": "1", "two": "2", "flag": True, "many": ["1", "2"], "last": "x y", "unset": "7"}
    assert overrides("python a.py x.y=1 +a.b.c='d e' z=3") == {"x.y": "1", "a.b.c": "d e"}


def test_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.csv"
    write_export(Exported("a,b\n"), path)
    assert path.read_bytes() == b"a,b\n"
    with pytest.raises(DataError, match="cannot write"):
        write_export(Exported("x"), tmp_path / "missing" / "plan.csv")
    with pytest.raises(UnicodeEncodeError):
        write_export(Exported("\ud800"), path)
    assert path.read_bytes() == b"a,b\n" and [item.name for item in tmp_path.iterdir()] == ["plan.csv"]
