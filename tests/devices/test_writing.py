"""A specification written as TOML is read back as it was."""

from __future__ import annotations

from pathlib import Path

from cdmpp.devices import known, load_device, lookup
from cdmpp.devices.loading import specification_toml
from cdmpp.devices.spec import Ceilings


def test_every_known_device(tmp_path: Path) -> None:
    for spec in known():
        path = tmp_path / "device.toml"
        path.write_text(specification_toml(spec, "a comment"), encoding="utf-8")
        assert load_device(str(path)) == spec, spec.name


def test_ceilings_and_odd_texts(tmp_path: Path) -> None:
    spec = lookup("t4").model_copy(
        update={
            "sustained": Ceilings(bytes_per_s=2.5e11, floor_graph_s=1.25e-6, source="probe"),
            "source": 'it "says" so\\: Büro 🙂 \x7f\n\ttwo lines',
        }
    )
    path = tmp_path / "device.toml"
    path.write_text(specification_toml(spec), encoding="utf-8")
    assert load_device(str(path)) == spec
