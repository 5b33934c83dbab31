"""Devices left out of the peers: errors and intervals of the correction by known devices alone.

``python -m benchmarks.peers --public-data DIR``: for each table of library kernels and each of its GPUs, at most
:data:`ROWS` rows of each family are predicted as of a device that training never had. The GPU itself (``device``), or
every GPU of its architecture (``architecture``), is left out of the peers. The peers' mean alone is scored: the
network's own prediction, which the shipped answer mixes in, has seen the device's rows. The constants of
:mod:`cdmpp.model.domain.peers` were chosen with this study. ``benchmarks/results/peers.json`` has fractions::

    {"format": 1, "command", "rows",
     "groups": [{"left_out": "device"|"architecture", "source", "family", "device", "n", "mape", "coverage",
                 "interval_score"}]}

The interval score of 80 % intervals of log latencies is their width, and ten times the distance of a measurement
outside (Gneiting and Raftery 2007, section 6.2); less is better.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import write_result
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.domain import peers
from cdmpp.model.domain.calibration import read_quantiles
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.programs.operators import operator_family
from cdmpp.train.config import load_config
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.query_batches import query_parts
from cdmpp.train.evaluation.tables import INTERVAL
from cdmpp.train.run import load_training_table

Array = np.ndarray[Any, np.dtype[Any]]

RESULTS = Path("benchmarks/results/peers.json")
#: Rows of each device, source and family, at most; fewer than ENOUGH are left out.
ROWS, ENOUGH = 250, 30


@dataclass(frozen=True)
class Sample:
    """Rows of one source, ordered by program, with the family of each."""

    rows: Array
    family: Array


def sample_of(table: MeasurementTable, chosen: Array, rng: np.random.Generator) -> Sample:
    """At most :data:`ROWS` of the chosen rows for each device and family."""
    rows = chosen[np.argsort(table.program_key[chosen], kind="stable")]
    keys, family = table.program_key[rows], np.empty(len(rows), dtype=object)
    for block in table.programs:
        low, high = np.searchsorted(keys, [int(block.row_index[0]), int(block.row_index[-1]) + 1])
        family[low:high] = operator_family(block.operator)
    kept = []
    for device in np.unique(table.device.codes[rows]):
        for name in np.unique(family):
            members = np.flatnonzero((table.device.codes[rows] == device) & (family == name))
            if len(members) >= ENOUGH:
                kept.append(rng.permutation(members)[:ROWS])
    order = np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.intp)
    return Sample(rows[order], family[order])


class LeftOut:
    """A pipeline whose peers lack some devices."""

    def __init__(self, model: str) -> None:
        self.pipeline = InferencePipeline(load_artifact(model))
        self.devices = {spec.name: spec for _, spec in self.pipeline._devices}
        self._all_peers, self.left_out = self.pipeline._peers.of, frozenset[str]()
        self.pipeline._peers.of = self._peers  # type: ignore[method-assign, assignment]

    def _peers(self, *kind: str) -> tuple[peers.Trained, ...]:
        return tuple(peer for peer in self._all_peers(*kind) if peer[1].name not in self.left_out)

    def forms(self, device: DeviceSpec) -> dict[str, frozenset[str]]:
        """Devices that are left out together with a device."""
        same = frozenset(name for name, spec in self.devices.items() if spec.arch == device.arch)
        return {"device": frozenset({device.name.removesuffix("-unseen")}), "architecture": same}


def measure(
    table: MeasurementTable, source: str, left_out: LeftOut, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Entries of the results file for one source."""
    names = np.array(table.source.names)
    usable = table.trainable & np.isfinite(table.latency_s) & (table.latency_s > 0)
    usable &= (names[table.source.codes] == source) & (table.backend.codes == table.backend.names.index("library"))
    known = [code for code, name in enumerate(table.device.names) if name in left_out.devices]
    gpus = [code for code in known if left_out.devices[table.device.names[code]].kind == "gpu"]
    sample = sample_of(table, np.flatnonzero(usable & np.isin(table.device.codes, gpus)), rng)
    if not len(sample.rows):
        return
    specs = {}
    for code in np.unique(table.device.codes[sample.rows]).tolist():
        sheet = table.device_spec(table.device.names[code]).nominal()
        # Other figures, by a hair: the model does not recognise the device.
        unseen = {
            "name": sheet.name + "-unseen",
            "mem_bandwidth_bytes_per_s": sheet.mem_bandwidth_bytes_per_s * 1.00001,
        }
        specs[sheet.name] = sheet.model_copy(update=unseen)
    results: dict[tuple[str, str, str], list[tuple[float, bool, float]]] = {}
    cache = FeatureCache(schedule=False)
    for part in query_parts(table, sample.rows, cache, specs, half_type=left_out.pipeline.half_type):
        logs, family = np.log(table.latency_s[sample.rows[part.index]]), sample.family[part.index]
        for number, spec in enumerate(part.batch.specs):
            members = np.flatnonzero(part.batch.rows.device[part.position] == number)
            if not len(members):
                continue
            queries = part.position[members]
            for form, names_out in left_out.forms(spec).items():
                left_out.left_out = names_out
                batch = replace(part.batch, rows=part.batch.rows.take(queries))
                output = left_out.pipeline.predict_base(batch)
                peerless = (
                    np.isnan(output.peers).all(axis=1) if output.peers is not None else np.ones(len(queries), bool)
                )
                low, high = read_quantiles(output.levels, output.factor, INTERVAL).T
                outside = np.maximum(0.0, np.maximum(low - logs[members], logs[members] - high))
                score = high - low + 10 * outside
                for i in np.flatnonzero(~peerless).tolist():
                    key = (form, str(family[members[i]]), spec.name.removesuffix("-unseen"))
                    error = abs(np.expm1(output.point[i] - logs[members[i]]))
                    results.setdefault(key, []).append((float(error), not outside[i], float(score[i])))
    for (form, name, device), values in sorted(results.items()):
        if len(values) >= ENOUGH:
            means = np.round(np.mean(values, axis=0), 4).tolist()
            figures = dict(zip(("mape", "coverage", "interval_score"), means, strict=True))
            yield {"left_out": form, "source": source, "family": name, "device": device, "n": len(values), **figures}


def main() -> None:
    """Measure every source and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--public-data", required=True)
    parser.add_argument("--model", default="models/base")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    # Nor does the network's own prediction widen intervals.
    peers.APART = np.inf
    for rule in ("LIBRARY_RULE", "EXPERTS_RULE"):
        setattr(peers, rule, getattr(peers, rule)._replace(share=1.0))
    config = load_config("configs/base.toml")
    config = config.model_copy(update={"data": config.data.model_copy(update={"records": ()})})
    table = load_training_table(config, options.public_data, ())
    left_out, rng, groups = LeftOut(options.model), np.random.default_rng(0), list[dict[str, Any]]()
    for source in sorted(table.source.names):
        groups += measure(table, source, left_out, rng)
        print(f"{source}: {len(groups)} groups", flush=True)
    content = {"format": 1, "command": "python -m benchmarks.peers --public-data DIR", "rows": ROWS, "groups": groups}
    write_result(options.out, content)
    for form in ("device", "architecture"):
        chosen = [group for group in groups if group["left_out"] == form]
        sources: dict[tuple[str, str], list[float]] = {}
        for group in chosen:
            sources.setdefault((group["source"], group["family"]), []).append(group["mape"])
        error = np.mean([np.mean(v) for v in sources.values()])
        covered, score = (np.mean([g[name] for g in chosen]) for name in ("coverage", "interval_score"))
        print(
            f"without the {form}: {100 * error:.1f} % (mean over sources and families), {100 * covered:.0f} % inside, "
            f"interval score {score:.2f}"
        )


if __name__ == "__main__":
    main()
