"""``python -m benchmarks.planning.gloo``: data-parallel training between two processes here, replayed
and measured.

Two processes with one thread each train a small MLP and a small transformer with PyTorch's
``DistributedDataParallel`` over gloo. Measured apart, in every round:

* the layers, with all of DDP but the transfers (a communication hook that does nothing), both processes at
once; * an all-reduce by size, with nothing else running; * an iteration without transfers of both processes:
an all-reduce waits for the slower one, iteration by iteration; * how much computation and transfers slow
each other down: gloo's threads run on the same cores; * the iteration itself at three bucket sizes, which
the replay is held against.

The replay gets the first four and nothing of the last. The all-reduces are also predicted, by the shipped model of
collectives with a correction of eight of the measured sizes (:mod:`benchmarks.planning.gloo_link`). Writes
``benchmarks/results/gloo.json`` and the marked table of docs/replay.md. Run it on an idle machine: the load is noted
beside the figures. ``--refit`` measures nothing: it fits the model to the all-reduces of the last run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.end_to_end.document import put_parts
from benchmarks.planning.gloo_link import fit_errors, predicted_link
from benchmarks.report.markdown import table
from benchmarks.report.results import write_result
from cdmpp.programs.zoo.transformers import EncoderLayer
from cdmpp.simulate.replay import Link
from cdmpp.simulate.replay.data_parallel import Iteration, Layer, Setup, fill_buckets, simulate
from cdmpp.simulate.replay.torch_model import Measured, measure_layers

ROOT = Path(__file__).parents[2]
OUT = ROOT / "benchmarks" / "results" / "gloo.json"
RANKS = 2
MIB = 2**20
BUCKETS_BYTES = (2 * MIB, 8 * MIB, 25 * MIB)
SIZES_BYTES = tuple(2**power for power in range(12, 26))
WARM, REPEATS, ROUNDS = 5, 20, 5
#: Share of all times that count, measured and parts alike: the fastest, because other work on the machine
#: only makes them longer.
FASTEST = 0.5


#: Ways of replaying; "predicted_all_reduces" takes the times of all-reduces from the fitted model.
WAYS = ("replayed", "without_waiting", "without_contention", "predicted_all_reduces")


class Mlp(nn.Module):
    """Five layers, most of width 1024; 3.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (512, 1024, 1024, 1024, 1024, 10)
        parts: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            parts += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.body = nn.Sequential(*parts[:-1])

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.body(x)
        return scores


class Transformer(nn.Module):
    """Four encoder layers of width 256 on 64 tokens; 3.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(2000, 256)
        self.layers = nn.Sequential(*(EncoderLayer(256, 4) for _ in range(4)))
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.tokens(tokens)).mean(1))
        return scores


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(128, 512)),
    "transformer": (Transformer, lambda: torch.randint(2000, (8, 64))),
}


@dataclass
class Round:
    """Measurements of one round, on rank 0."""

    layers: list[Layer]
    update_s: float
    alone_s: float
    slower_s: float
    table: list[tuple[float, float]]
    compute_slowdown: float
    comm_slowdown: float
    iterations_s: dict[int, list[float]]
    bucket_bytes: dict[int, list[int]]


def typical(values: Iterable[float]) -> float:
    """Mean of the fastest half."""
    ordered = sorted(values)
    return statistics.fmean(ordered[: max(round(FASTEST * len(ordered)), 1)])


class Trainer:
    """A network with its data and its optimizer, in one of the processes.

    ``silent``: DDP without the transfers. Each has a network of its own: DDP leaves hooks on its parameters.
    """

    def __init__(self, name: str, bucket_bytes: int, silent: bool = False) -> None:
        make, data = NETWORKS[name]
        torch.manual_seed(0)
        self.network = make()
        self.inputs = data()
        self.classes = torch.randint(10, (len(self.inputs),))
        self.optimizer = torch.optim.SGD(self.network.parameters(), 1e-3)
        self.module = DistributedDataParallel(self.network, bucket_cap_mb=bucket_bytes / MIB)
        if silent:
            self.module.register_comm_hook(None, _no_transfer)

    def loss(self) -> Tensor:
        """Forward and loss."""
        return nn.functional.cross_entropy(self.module(self.inputs), self.classes)

    def iterate(self) -> float:
        """One iteration; its seconds."""
        self.network.zero_grad(set_to_none=True)
        start = time.perf_counter()
        self.loss().backward()
        self.optimizer.step()
        return time.perf_counter() - start


def _no_transfer(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and not as text
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def measure_round(name: str, repeats: int) -> Round:
    """All measurements once, ``repeats`` iterations each; both processes call it together."""
    silent = Trainer(name, 25 * MIB, silent=True)
    dist.barrier()
    parts: Measured = measure_layers(
        silent.network, silent.loss, silent.optimizer.step, repeats=repeats, warm=WARM, fastest=FASTEST
    )
    dist.barrier()
    alone_s, slower_s = _alone(silent, repeats)
    times = [(float(size), _transfer_s(size)) for size in SIZES_BYTES]
    slowdowns = _slowdowns(silent, alone_s, min(repeats, 10))
    iterations_s, buckets = {}, {}
    for bucket_bytes in BUCKETS_BYTES:
        trainer = Trainer(name, bucket_bytes)
        dist.barrier()
        for _ in range(WARM):
            trainer.iterate()
        iterations_s[bucket_bytes] = [trainer.iterate() for _ in range(repeats)]
        logging_data = trainer.module._get_ddp_logging_data()
        text = logging_data.get("rebuilt_bucket_sizes") or logging_data["bucket_sizes"]
        buckets[bucket_bytes] = [int(part) for part in str(text).split(",")]
    return Round(parts.layers, parts.update_s, alone_s, slower_s, times, *slowdowns, iterations_s, buckets)


def _alone(silent: Trainer, repeats: int) -> tuple[float, float]:
    """Seconds of an iteration without transfers: of this process, and of the slower one of each iteration."""
    own, slower = [], []
    for _ in range(repeats):
        dist.barrier()
        own.append(silent.iterate())
        both = torch.tensor(own[-1], dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        slower.append(float(both))
    return typical(own), typical(slower)


def _transfer_s(size: int) -> float:
    buffer = torch.zeros(size // 4)
    times_s = []
    for index in range(4 + 15):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        if index >= 4:
            times_s.append(time.perf_counter() - start)
    return typical(times_s)


def _slowdowns(silent: Trainer, alone_s: float, iterations: int) -> tuple[float, float]:
    """Slowdown factors of iterations and of transfers while both run, over about so many iterations."""
    size = 4 * MIB
    wanted = torch.tensor(max(round(iterations * alone_s / _transfer_s(size)), 4))
    dist.broadcast(wanted, 0)  # both must send as often
    count = int(wanted)
    buffers = [torch.zeros(size // 4) for _ in range(4)]  # of works in flight two run at a time

    def send() -> list[dist.Work]:
        dist.barrier()
        return [dist.all_reduce(buffer, async_op=True) for buffer in islice(cycle(buffers), count)]

    times_s, counts = [], []
    for busy in (False, True):
        start, done = time.perf_counter(), 0
        sent = send()
        while busy and not all(work.is_completed() for work in sent):
            silent.iterate()
            done += 1
        for work in sent:
            work.wait()
        times_s.append(time.perf_counter() - start)
        counts.append(done)
    return max(times_s[1] / (max(counts[1], 1) * alone_s), 1.0), max(times_s[1] / times_s[0], 1.0)


def _run(rank: int, name: str, store: str, rounds: int, repeats: int, out: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), RANKS, rank)
    try:
        results = [measure_round(name, repeats) for _ in range(rounds)]
        if rank == 0:
            torch.save([asdict(result) for result in results], out)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def measure(name: str, rounds: int, repeats: int) -> list[Round]:
    """Rounds of one network, measured in two worker processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "rounds.pt")
        arguments = (name, str(Path(folder) / "store"), rounds, repeats, out)
        processes.spawn(_run, arguments, nprocs=RANKS)  # type: ignore[no-untyped-call]
        saved = torch.load(out, weights_only=True)
    return [Round(**{**values, "layers": [Layer(**layer) for layer in values["layers"]]}) for values in saved]


def replays(one: Round) -> dict[str, Callable[[int], Iteration]]:
    """Ways of replaying a round: bucket size to iteration."""
    link, skew = Link(table=tuple(one.table)), one.slower_s / one.alone_s
    shared = Setup(RANKS, link, "measured", one.compute_slowdown, one.comm_slowdown)
    apart = Setup(RANKS, link, "measured")

    def way(setup: Setup, factor: float) -> Callable[[int], Iteration]:
        layers = [Layer(x.name, factor * x.forward_s, factor * x.backward_s, x.gradient_bytes) for x in one.layers]
        return lambda size: simulate(layers, setup, size, None, factor * one.update_s)

    predicted = Setup(RANKS, predicted_link(one.table, RANKS), "measured", one.compute_slowdown, one.comm_slowdown)
    return {
        "replayed": way(shared, skew),
        "without_waiting": way(shared, 1.0),
        "without_contention": way(apart, skew),
        "predicted_all_reduces": way(predicted, skew),
    }


def compare(name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """The replay beside the measured iterations, round by round: what else the machine does changes."""

    def mean(figure: str) -> float:
        return statistics.fmean(getattr(measured, figure) for measured in rounds)

    columns = zip(*(one.table for one in rounds), strict=True)
    table = {str(int(c[0][0])): _ms(statistics.fmean(seconds for _, seconds in c)) for c in columns}
    layers = rounds[0].layers
    comparison: dict[str, Any] = {
        "network": name,
        "layers": len(layers),
        "gradient_bytes": sum(sum(x.gradient_bytes) for x in layers),
        "alone_ms": _ms(mean("alone_s")),
        "slower_ms": _ms(mean("slower_s")),
        "update_ms": _ms(mean("update_s")),
        "compute_slowdown": round(mean("compute_slowdown"), 3),
        "comm_slowdown": round(mean("comm_slowdown"), 3),
        "all_reduce_ms": table,
        "all_reduce_fit": fit_errors(_seconds(table), RANKS),
        "buckets": [],
    }
    replayed = [replays(one) for one in rounds]
    for bucket_bytes in BUCKETS_BYTES:
        typical_s = [typical(one.iterations_s[bucket_bytes]) for one in rounds]
        own = [[int(b.bytes) for b in fill_buckets(one.layers, bucket_bytes)] for one in rounds]
        row: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "buckets": len(own[0]),
            "same_as_ddp": own == [one.bucket_bytes[bucket_bytes] for one in rounds],
            "measured_ms": _ms(statistics.median(typical_s)),
            "rounds_ms": [_ms(s) for s in typical_s],
        }
        for way in WAYS:
            replayed_s = [ways[way](bucket_bytes).iteration_s for ways in replayed]
            errors = [a / b - 1 for a, b in zip(replayed_s, typical_s, strict=True)]
            row[f"{way}_ms"] = _ms(statistics.median(replayed_s))
            row[f"{way}_error"] = round(statistics.median(errors), 4)
            row[f"{way}_errors"] = [round(error, 4) for error in errors]
        comparison["buckets"].append(row)
    return comparison


def document(result: Mapping[str, Any]) -> str:
    """The result for docs/replay.md."""
    rows = []
    for network in result["networks"]:
        for bucket in network["buckets"]:
            rounds_ms = bucket["rounds_ms"]
            rows.append(
                [
                    network["network"],
                    f"{bucket['bucket_bytes'] // MIB} MiB",
                    str(bucket["buckets"]),
                    f"{bucket['measured_ms']:.1f} ({min(rounds_ms):.1f}-{max(rounds_ms):.1f})",
                    f"{bucket['replayed_ms']:.1f}",
                    f"**{100 * bucket['replayed_error']:+.1f} %**",
                    " ".join(f"{100 * error:+.0f}" for error in bucket["replayed_errors"]),
                    f"{100 * bucket['without_waiting_error']:+.1f} %",
                    f"{100 * bucket['without_contention_error']:+.1f} %",
                ]
            )
            if "predicted_all_reduces_error" in bucket:  # runs before the model of collectives have none
                rows[-1].append(f"{100 * bucket['predicted_all_reduces_error']:+.1f} %")
    header = (
        "network",
        "bucket",
        "all-reduces",
        "measured, ms (rounds)",
        "replayed, ms",
        "error",
        "by round, %",
        "no waiting",
        "no contention",
        "predicted all-reduces",
    )[: len(rows[0])]
    slow = "; ".join(
        f"{n['network']}: {n['alone_ms']:.1f} ms alone, {n['slower_ms']:.1f} ms the slower of the two, "
        f"computation {n['compute_slowdown']:.2f} times as long beside transfers, "
        f"these {n['comm_slowdown']:.2f} times as long"
        for n in result["networks"]
    )
    before, after = result["load_before"][0], result["load_after"][0]
    load = f"{result['cores']} cores, load average {before} before and {after} after"
    return f"{table(header, rows)}\n\n{load}; {result['rounds']} rounds. {slow}.{_fit_text(result['networks'])}"


def _fit_text(networks: Sequence[Mapping[str, Any]]) -> str:
    """Errors of the fitted model of all-reduces on the sizes that it was not fitted to."""
    fits = [(network["network"], network["all_reduce_fit"]) for network in networks if "all_reduce_fit" in network]
    if not fits:
        return ""
    errors = "; ".join(
        f"{name}: {100 * fit['held_out_error']:.0f} % ({100 * fit['held_out_error_before']:.0f} % without the fit)"
        for name, fit in fits
    )
    fitted = len(fits[0][1]["fitted_bytes"])
    return (
        f"\n\nModel of collectives, fitted to {fitted} sizes of an all-reduce; mean error on the other sizes: {errors}."
    )


def _seconds(table: Mapping[str, float]) -> list[tuple[float, float]]:
    """Bytes and seconds of a stored table of milliseconds."""
    return [(float(size), 1e-3 * ms) for size, ms in table.items()]


def refit(out: Path) -> dict[str, Any]:
    """The stored result with the model fitted to its all-reduces again."""
    result: dict[str, Any] = json.loads(out.read_text())
    for network in result["networks"]:
        network["all_reduce_fit"] = fit_errors(_seconds(network["all_reduce_ms"]), RANKS)
    return result


def _ms(seconds: float) -> float:
    return float(f"{1e3 * seconds:.5g}")


def _run_all(names: Sequence[str], rounds: int, repeats: int) -> dict[str, Any]:
    """Measure and replay networks."""
    before = os.getloadavg()
    networks = [compare(name, measure(name, rounds, repeats)) for name in names]
    return {
        "command": "python -m benchmarks.planning.gloo",
        "cores": os.cpu_count(),
        "rounds": rounds,
        "load_before": [round(load, 2) for load in before],
        "load_after": [round(load, 2) for load in os.getloadavg()],
        "torch": torch.__version__,
        "fastest": FASTEST,
        "networks": networks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="iterations of each measurement")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--refit", action="store_true", help="fit the model to the stored all-reduces; measure nothing")
    options = parser.parse_args()
    result = refit(options.out) if options.refit else _run_all(options.networks, options.rounds, options.repeats)
    write_result(options.out, result)
    if options.out == OUT:
        put_parts(ROOT / "docs" / "replay.md", {"gloo": document(result)})
    print(document(result))


if __name__ == "__main__":
    main()
