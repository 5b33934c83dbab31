"""A sweep by two Ray workers has the local results."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray.*")]


@pytest.mark.nightly
def test_results_equal_the_local_ones(ray: Any, tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "examples/llm/qwen2.5-14b.json"
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'config = "{config}"\ndevices = ["h100-sxm", "l4"]\ntp = [1, 2, 3]\nbatch = [1, 8, 32]\noutput = 16\n'
        "price_per_gpu_hour = { h100-sxm = 3.0, l4 = 0.5 }\n"
    )
    files = [tmp_path / "ray.json", tmp_path / "local.json"]
    for file, more in zip(files, (["--ray"], []), strict=True):
        assert CliRunner().invoke(app, ["sweep", str(path), "--out", str(file), *more]).exit_code == 0
    assert files[0].read_bytes() == files[1].read_bytes()
