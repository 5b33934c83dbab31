"""Make ``cpu_core.csv``: latencies of operators in PyTorch on one core of this machine, and ``cpu_core.toml``.

    python examples/make_measurements.py [FOLDER]

The files in this folder were measured on a virtual machine with two cores, which other work shared.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from cdmpp.data.measure.library import LibraryTimer, find_timing_device
from cdmpp.devices.loading import load_device, specification_toml
from cdmpp.programs.operators import parse_operator

NAME = "cpu_core"


def programs() -> list[str]:
    """Layers of small networks at several batch sizes."""
    texts = [
        f"linear:m={m},n={n},k={k},bias=true" for m in (32, 128, 384) for n in (512, 1024, 2048) for k in (512, 768)
    ]
    texts += [f"bmm:batch={b},m={m},n={m},k=64" for b in (4, 12, 24) for m in (96, 128, 192, 256)]
    texts += [
        f"{name}:rows={rows},cols={cols}"
        for name in ("softmax", "layernorm")
        for rows in (512, 1024, 2048)
        for cols in (256, 512, 1000)
    ]
    texts += [
        f"{name}:rows={rows},cols={cols}"
        for name in ("gelu", "relu", "add", "silu_and_mul")
        for rows in (128, 512)
        for cols in (768, 1024, 4096)
    ]
    texts += [
        f"conv2d:n=1,c_in={c},h={size},w={size},c_out={k},kh=3,kw=3,pad_h=1,pad_w=1"
        for c, k in ((16, 16), (32, 64), (64, 64))
        for size in (14, 28, 56)
    ]
    return texts


def main() -> None:
    """Measure the programs and write both files."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    folder = parser.parse_args().folder
    device = load_device("native@1").model_copy(update={"name": "cpu-core"})
    timing_device = find_timing_device("cpu", device)
    (folder / f"{NAME}.toml").write_text(specification_toml(device), encoding="utf-8")
    with LibraryTimer(timing_device, "eager").ready() as timer:
        latencies_s = [timer.time(parse_operator(text)).latency_s for text in programs()]
    with (folder / f"{NAME}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("program", "latency_us", "device", "protocol", "framework"))
        for text, latency_s in zip(programs(), latencies_s, strict=True):
            writer.writerow((text, f"{1e6 * latency_s:.5g}", device.name, "eager", "pytorch"))


if __name__ == "__main__":
    main()
