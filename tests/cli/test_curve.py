"""``cdmpp curve``: the results of :func:`cdmpp.predict.curves.predict_curve` as JSON and as a table."""

from pathlib import Path

import pytest

from cdmpp.devices import SPECIFICATION_EXAMPLE
from cdmpp.predict.curves import Template, predict_curve
from cdmpp.predict.predictor import LatencyPredictor
from tests.cli.conftest import Run

pytestmark = pytest.mark.slow

TEMPLATE = "linear:n=4096,k=1024,dtype=float16"


def test_json_equals_the_python_result(run: Run, predictor: LatencyPredictor) -> None:
    linear, norm = "linear:m=batch*ceil(tokens*0.5),n=64,k=max(64,batch)", "rmsnorm:rows=tokens,cols=64"
    axes = ("--axis=batch=1,2", "--axis=tokens=1,8", "--axis=dtype=float16,float32", "--monotone=tokens")
    kind = ("--device=t4", "-d", "l4", "--protocol=eager", "--framework=pytorch", "--implementation=composed")
    result = run.json("curve", f"3*{linear}", norm, *axes, *kind, "--quantile=0.25", "--quantile=0.75")
    options = {"protocol": "eager", "framework": "pytorch", "implementation": "composed"}
    expected = predict_curve(
        predictor,
        [Template.parse(linear, 3), Template.parse(norm)],
        {"batch": [1, 2], "tokens": [1, 8], "dtype": ["float16", "float32"]},
        ["t4", "l4"],
        quantiles=(0.25, 0.75),
        monotone=["tokens"],
        **options,
    )
    assert result == expected.to_dict()


def test_table_has_a_line_for_every_point(run: Run, tmp_path: Path) -> None:
    device = tmp_path / "device.toml"
    device.write_text(SPECIFICATION_EXAMPLE)
    lines = run.ok("curve", TEMPLATE, "--axis", "m=1,2,4,8", "--device", "t4", "--device", device).stdout.splitlines()
    assert lines[0].split() == ["device", "m", "latency", "fitted", "interval", "domain"]
    assert [line.split()[:2] for line in lines[1:9]] == [[d, m] for d in ("t4", "my-gpu") for m in "1248"]
    assert "does not fall along m" in lines[-1]


def test_points_that_cannot_be_predicted_are_reported_once(run: Run) -> None:
    result = run.ok("curve", TEMPLATE, "--axis", "m=1,0,2", "--device", "t4", "--device", "no-such-gpu")
    assert len(result.stdout.splitlines()) == 4
    assert result.stderr.count("no-such-gpu") == 1
    assert result.stderr.count("greater than or equal to 1") == 1
    run.refused("curve", TEMPLATE, "--axis", "m=0", "--device", "t4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--axis", "m=1", "--axis", "x=1"), "'x' is not used"),
        (("--axis", "m"), "NAME=A,B"),
        (("--axis", "m=1", "--axis", "m=2"), "twice"),
        (("--axis", "k=1"), "needs m"),
        (("--axis", "m=1", "--monotone", "n"), "monotone"),
    ],
)
def test_invalid_curves_are_refused_in_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run.refused("curve", TEMPLATE, "--device", "t4", *arguments)
    assert message in result
    assert "hint:" in result or "monotone" in message
