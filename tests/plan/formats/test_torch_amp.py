"""Types of modules from a precision plan, applied to a torch model."""

import json
from typing import Any

import pytest

from cdmpp import make_plan
from cdmpp.errors import FieldError
from cdmpp.plan.formats import export_plan, import_request

torch = pytest.importorskip("torch")

WIDTH, BATCH = 16, 8


def request() -> dict[str, Any]:
    """Four modules in a row; two of them disturb training much in float16."""
    operators: list[dict[str, Any]] = []
    for name, error in (("0", 1.0), ("1.inner", 50.0), ("2", 2.0), ("3", 70.0)):
        operators.append(
            {
                "id": name,
                "deps": [operators[-1]["id"]] if operators else [],
                "output_elements": BATCH * WIDTH,
                "weight_elements": WIDTH * WIDTH,
                "sensitivity": {"float16": error, "bfloat16": error / 2},
                "costs": [
                    {"dtype": dtype, "forward_s": seconds, "backward_s": 2 * seconds}
                    for dtype, seconds in (("float16", 0.010), ("bfloat16", 0.011), ("float32", 0.020))
                ],
            }
        )
    device = {
        "name": "gpu",
        "dtypes": ["float16", "bfloat16", "float32"],
        "casts": [
            {"source": a, "target": b, "s_per_element": 0.0}
            for a in ("float16", "bfloat16", "float32")
            for b in ("float16", "bfloat16", "float32")
            if a != b
        ],
    }
    return {"devices": [device], "operators": operators, "iteration_limit_s": 0.186, "budget_s": 60}


@pytest.fixture(scope="module")
def planned() -> tuple[dict[str, Any], dict[str, Any]]:
    """The request and its plan, which has several types."""
    plan = make_plan("precision", request())
    assert len(set(plan["devices"][0]["dtypes"].values())) > 1
    return request(), plan


def model() -> Any:
    """Modules with the names of the operators."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), Block(), torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 1)
    )


def test_executed_types_equal_those_of_the_plan(planned: tuple[dict[str, Any], dict[str, Any]]) -> None:
    from cdmpp.plan.formats.torch_amp_apply import apply_types

    types = json.loads(export_plan("torch-amp", "precision", *planned).text)
    assert types == planned[1]["devices"][0]["dtypes"]
    net = model()
    apply_types(net, types)
    outputs: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    for name in types:
        part = net.get_submodule(name)
        part.register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out.dtype}))
        part.register_full_backward_hook(lambda _, __, grad, name=name: gradients.update({name: grad[0].dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # has no effect within the modules
        loss = net(torch.randn(BATCH, WIDTH, requires_grad=True)).float().square().mean()
    loss.backward()
    expected = {name: getattr(torch, dtype) for name, dtype in types.items()}
    assert outputs == expected and gradients == expected
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in net.parameters())
    assert list(net.state_dict()) == list(model().state_dict())


def test_float32_everywhere_changes_nothing() -> None:
    from cdmpp.plan.formats.torch_amp_apply import apply_types

    net, x = model(), torch.randn(BATCH, WIDTH)
    expected = net(x)
    apply_types(net, dict.fromkeys(("0", "1.inner", "2", "3"), "float32"))
    assert torch.equal(net(x), expected)


def test_names_that_are_no_modules_are_listed() -> None:
    from cdmpp.plan.formats.torch_amp_apply import apply_types

    with pytest.raises(FieldError, match="scores: no such modules"):
        apply_types(model(), {"0": "float16", "scores": "float16"})


def test_map_that_is_read_back_gives_the_same_plan(planned: tuple[dict[str, Any], dict[str, Any]]) -> None:
    given, plan = planned
    text = export_plan("torch-amp", "precision", given, plan).text
    found = import_request("torch-amp", text, "precision", fields=given).request
    assert make_plan("precision", found)["devices"][0]["dtypes"] == plan["devices"][0]["dtypes"]


def test_device_is_named_where_there_are_several() -> None:
    two = request()
    two["devices"] = [{**two["devices"][0], "name": name} for name in ("a", "b")]
    plan = make_plan("precision", two)
    with pytest.raises(FieldError, match="several devices"):
        export_plan("torch-amp", "precision", two, plan)
    with pytest.raises(FieldError, match="'c' is not in the plan"):
        export_plan("torch-amp", "precision", two, plan, device="c")
    assert json.loads(export_plan("torch-amp", "precision", two, plan, device="b").text)


def test_integer_operators_are_refused() -> None:
    integer = request()
    integer["devices"][0]["dtypes"] = ["int8", "float32"]
    integer["devices"][0].pop("casts")
    for operator in integer["operators"]:
        operator["sensitivity"] = {"int8": 1.0}
        operator["costs"][0]["dtype"] = "int8"
    integer["iteration_limit_s"] = None
    with pytest.raises(FieldError, match="compute in int8"):
        export_plan("torch-amp", "precision", integer, make_plan("precision", integer))


@pytest.mark.parametrize("text", ["[]", "{", '{"0": "int4"}', "{}"])
def test_text_that_is_no_map_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        import_request("torch-amp", text, "precision")
