"""What-ifs on traces against the changed network, measured on one core of this machine.

``python -m benchmarks.traces``: records iterations of training with and without some layers in turns, replays the
recordings with them, and compares "without these layers" with the recordings without them. Writes
``benchmarks/results/traces.json``.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.report.results import write_result
from cdmpp.simulate.traces import replay_trace

OUT = Path("benchmarks/results/traces.json")
#: Expression of --remove -> the layers of a block without what it removes.
CHANGES: dict[str, tuple[str, ...]] = {
    "(?i)gelu": ("linear", "norm"),
    "layer_norm|NativeLayerNorm": ("linear", "gelu"),
    "(?i)gelu|layer_?norm": ("linear",),
}
_SKIPPED = 4


def network(layers: Sequence[str], width: int) -> nn.Sequential:
    """Four blocks of the named layers and a classifier."""
    make: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(width, width),
        "gelu": nn.GELU,
        "norm": lambda: nn.LayerNorm(width),
    }
    return nn.Sequential(*[make[name]() for _ in range(4) for name in layers], nn.Linear(width, 10))


def record(path: Path, model: nn.Module, width: int, batch: int, iterations: int) -> None:
    """Write the trace of some iterations of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, target = torch.randn(batch, width), torch.randint(0, 10, (batch,))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=_SKIPPED - 2, warmup=2, active=iterations, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(_SKIPPED + iterations):
            loss = nn.functional.cross_entropy(model(data), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step()


def measure(remove: str, layers: Sequence[str], options: argparse.Namespace) -> dict[str, float | str | int]:
    """Fast iterations with the layers, replayed without them, and measured without them.

    The tenth of the iterations that is fastest counts, by its slowest one: other work only makes an iteration longer.
    """
    whole: list[float] = []
    replayed: list[float] = []
    changed: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            first, second = Path(folder) / "with.json", Path(folder) / "without.json"
            for path, names in ((first, ("linear", "gelu", "norm")), (second, layers)):
                record(path, network(names, options.width), options.width, options.batch, options.iterations)
            for number in range(_SKIPPED, _SKIPPED + options.iterations):
                answer = replay_trace(first, iteration=number, remove=[remove])
                whole.append(answer.measured_s)
                replayed.append(answer.what_if[0].seconds)
                changed.append(replay_trace(second, iteration=number).measured_s)
    before_s, predicted_s, after_s = (float(np.quantile(values, 0.1)) for values in (whole, replayed, changed))
    return {
        "remove": remove,
        "iterations": len(whole),
        "before_s": before_s,
        "replayed_s": predicted_s,
        "measured_s": after_s,
        "error": predicted_s / after_s - 1,
    }


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=10, help="recordings of each network, in turns")
    parser.add_argument("--iterations", type=int, default=12, help="iterations of a recording")
    parser.add_argument("--width", type=int, default=256, help="width of the layers")
    parser.add_argument("--batch", type=int, default=512, help="rows of a batch")
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measure(remove, layers, options) for remove, layers in CHANGES.items()]
    print("remove                      before   replayed   measured   error")
    for row in rows:
        times = "".join(f"{1e3 * float(row[key]):8.2f} ms" for key in ("before_s", "replayed_s", "measured_s"))
        print(f"{row['remove']:24s}{times}  {100 * float(row['error']):+.1f} %")
    write_result(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
