"""``cdmpp probe``: records, a device specification, and errors for unavailable devices."""

from pathlib import Path

import pytest
import torch

from cdmpp.data.load import load_table
from cdmpp.data.measure import probe as probe_module
from cdmpp.devices import load_device
from cdmpp.devices.loading import specification_toml
from cdmpp.programs.operators import parse_operator
from tests.cli.conftest import Run
from tests.data.test_device_specs import cpu


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Specification file of a user-defined CPU, with a probe of four small programs."""
    texts = ("linear:m=64,n=64,k=64", "copy:rows=8,cols=8", "relu:rows=1,cols=1", "softmax:rows=4,cols=4,dtype=int8")
    monkeypatch.setattr(probe_module, "probe_programs", lambda *_: [parse_operator(t) for t in texts])
    path = tmp_path / "mine.toml"
    path.write_text(specification_toml(cpu("mine")))
    return path


def test_probe_writes_records_and_a_specification(run: Run, device: Path, tmp_path: Path) -> None:
    out = tmp_path / "probed"
    summary = run.json("probe", "--device", device, "--threads", 1, "--out", out)
    assert [bool(p["failure"]) for p in summary["programs"]] == [False, False, False, True]
    assert "int8" in summary["programs"][3]["failure"]
    table = load_table(out)
    assert table.device.used() == ("mine",) and table.latency_s[0] == summary["programs"][0]["latency_s"]
    spec = load_device(str(out / "device.toml"))
    assert spec.nominal() == cpu("mine")
    assert spec.sustained is not None and spec.sustained.figures() == summary["sustained"]
    assert spec.sustained.floor_eager_s is not None and 1e-8 < spec.sustained.floor_eager_s < 1e-2


def test_text_lists_ceilings_and_files(run: Run, device: Path, tmp_path: Path) -> None:
    result = run.ok("probe", "--device", device, "--out", tmp_path / "probed")
    assert "floor_eager_s" in result.stdout and "sustained by mine" in result.stdout
    assert f"wrote {tmp_path / 'probed' / 'records.parquet'}" in result.stdout


def test_unavailable_devices_and_protocols_are_refused(run: Run, device: Path, tmp_path: Path) -> None:
    out = tmp_path / "probed"
    for arguments, message in (
        (("--on", "tpu"), "cannot measure on 'tpu'"),
        (("--protocol", "graph"), "on a CPU"),
        (("--device", "t4", "--on", "cpu"), "not a CPU"),
        *([] if torch.cuda.is_available() else [(("--on", "cuda:0"), "0 CUDA devices")]),
        *([] if torch.cuda.is_available() else [(("--device", "t4"), "0 CUDA devices")]),
    ):
        assert message in run.refused("probe", "--device", device, *arguments, "--out", out)
        assert not out.exists()
