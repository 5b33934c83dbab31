"""Published measurements of serving systems in our terms."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cdmpp.devices.registry import lookup
from cdmpp.errors import CdmppError
from cdmpp.llm import Decode, LLMConfig, Prefill, read_config
from cdmpp.llm.operators import Step

#: Single steps of one model and layout: compositions differ by a token, and neighbours say the same.
MAX_STEPS = 100
#: Series of requests in flight that contradict themselves: 173 of 178 fall by less than a twentieth.
FALL = 1.2
#: Times by which the better of two devices may be slower at the same setting.
SLOWER = 1.5
ROOT = Path(__file__).parents[2]
#: Devices of the sources by our name. A GPU of the MI250 rows is one die: dense models take the time of one, though
#: Mixtral's 93 GB, which no die holds, are there as well (left out, counted).
DEVICES = {
    "Nvidia A100 GPU": "a100-sxm4-40gb",
    "Nvidia GH200 GPU": "gh200",
    "AMD MI250 GPU": "mi250-gcd",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "B300 (not stated in the file)": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200",
}
ENGINES = {"vLLM": "vllm-2024", "TensorRT-LLM": "trtllm-2024"} | {
    name: name for name in ("vllm", "vllm-0.12", "sglang", "trtllm")
}
WEIGHTS = {"fp8": "float8_e4m3", "fp8_block": "float8_e4m3", "nvfp4": "float4_e2m1"}
#: Configurations of PipeWeave's models.
_PIPEWEAVE = {"Qwen2.5-14B": "qwen2.5-14b", "Llama-3.1-70B": "llama-3.1-70b"}
_PIPEWEAVE_FIGURES = {"ttft_s": "prefill_ms", "total_s": "total_ms"}
_KEYS = ["source", "kind", "framework", "device", "model", "tp", "ep", "dp", "dtype", "batch", "input_tokens"]
_KEYS += ["output_tokens", "ctx_requests", "ctx_kv", "decode_requests", "mean_decode_kv"]


@dataclass(frozen=True)
class Cell:
    """A measured duration."""

    source: str  # kind of measurement, as tables name it
    engine: str  # name of the shipped profile
    device: str
    model: str
    config: str  # path of the model's configuration
    request: dict[str, Any]  # arguments of :func:`cdmpp.llm.estimate`; of a single step only those of layout and types
    name: str  # total_s, ttft_s, tpot_s or step_s
    seconds: float
    closed_loop: bool = False  # ``tpot_s`` between the prefills of the other requests
    step: Step | None = None  # what a ``step_s`` is the time of
    lengths: tuple[int, ...] | None = field(default=None)
    row: tuple[Any, ...] = ()  # keys of the source's row at fixed concurrency

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.step.batch if self.step is not None else int(self.request["batch"])


def read_cells(data: Path, configs: Path) -> list[Cell]:
    """Rows that our names cover, one for repeated keys (their median)."""
    alias = configs_by_name(configs)
    table = read_table(data)
    closed = (table.kind == "closed_loop_agg") & (table.quantity == "tpot_ms")
    # Gathered clusters have counts of GPUs that are no layout of one engine.
    closed &= (table.tp * table.dp == table.gpus) & table.tp.isin([1, 2, 4, 8, 16])
    steps = table.kind.isin(["engine_step_decode", "engine_step_context"]) & (table.ctx_kv.fillna(0) == 0)
    table = table[closed | steps | (table.kind == "static_batch")]
    table = table[table.device.isin(DEVICES) & table.model.isin(alias) & table.framework.isin(ENGINES)]
    cells = [
        _cell(dict(zip(_KEYS, key, strict=True)), float(group.value.median()) / 1e3, str(configs / alias[str(key[4])]))
        for key, group in table.groupby(_KEYS, dropna=False)
    ]
    return [*_thinned(consistent(cells)), *_pipeweave(data)]


def read_table(data: Path) -> pd.DataFrame:
    """Rows of serving systems; the framework of vLLM 0.12 is the name of its profile."""
    table = pd.read_csv(data / "e2e_llm_serving.csv.gz", low_memory=False)
    old = (table.framework == "vllm") & table.version.fillna("").str.startswith("0.12")
    return table.assign(framework=table.framework.mask(old, "vllm-0.12"))


def consistent(cells: Sequence[Cell]) -> list[Cell]:
    """Cells without those at fixed concurrency that contradict others.

    A series is left out whose time per token falls by :data:`FALL` from a batch to a larger one, and a cell that takes
    :data:`SLOWER` times as long as on a device of no more bandwidth and no faster arithmetic.
    """
    series, settings = defaultdict[str, list[Cell]](list), defaultdict[str, list[Cell]](list)
    for cell in cells:
        if cell.closed_loop:
            layout = {name: value for name, value in cell.request.items() if name != "batch"}
            series[str((cell.engine, cell.device, cell.config, layout))].append(cell)
            settings[str((cell.engine, str(config_of(cell.config)), cell.request))].append(cell)
    wrong = set[int]()
    for group in series.values():
        seconds = np.array([cell.seconds for cell in sorted(group, key=lambda cell: cell.batch)])
        if (np.maximum.accumulate(seconds) / seconds).max() > FALL:
            wrong |= {id(cell) for cell in group}
    for group in settings.values():
        for cell in group:
            slower = [other.seconds for other in group if (_rates(other.device) <= _rates(cell.device)).all()]
            if cell.seconds > SLOWER * min(slower):
                wrong.add(id(cell))
    return [cell for cell in cells if id(cell) not in wrong]


@cache
def _rates(name: str) -> np.ndarray[Any, Any]:
    device = lookup(name)
    return np.array([device.mem_bandwidth_bytes_per_s, device.peak("bfloat16", matrix=True) or 0.0])


@cache
def config_of(path: str) -> LLMConfig | CdmppError:
    """The architecture of a configuration, or why it is not known."""
    try:
        return read_config(path)
    except CdmppError as error:
        return error


def _thinned(cells: Sequence[Cell]) -> Iterator[Cell]:
    """At most :data:`MAX_STEPS` single steps of each model and layout, evenly chosen; all other cells."""
    groups: dict[tuple[Any, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        key = () if cell.step is None else (cell.source, cell.model, *cell.request.values())
        groups[key].append(cell)
    for key, group in groups.items():
        yield from group[:: 1 if not key else -(-len(group) // MAX_STEPS)]


def configs_by_name(folder: Path) -> dict[str, str]:
    """File of each model that the tables name, by its name with and without its publisher."""
    with (folder / "aliases.csv").open(encoding="utf-8") as file:
        alias = {row["name"]: row["config"] for row in csv.DictReader(file) if row["table"] == "serving"}
    return alias | {name.rpartition("/")[2]: config for name, config in alias.items()}


def _cell(row: dict[str, Any], seconds: float, config: str) -> Cell:
    batch, engine = int(row["batch"]), ENGINES[row["framework"]]
    request: dict[str, Any] = {"tp": int(row["tp"])}
    common = (engine, DEVICES[row["device"]], str(row["model"]).rpartition("/")[2], config)
    if row["kind"] == "static_batch":
        request |= {"batch": batch, "input": int(row["input_tokens"]), "output": int(row["output_tokens"])}
        return Cell("static batches", *common, {**request, "dtype": "float16"}, "total_s", seconds)
    request |= {"ep": max(1, int(row["ep"])), "dp": max(1, int(row["dp"]))}
    if row["kind"] == "closed_loop_agg":
        request |= {"batch": batch, "input": int(row["input_tokens"]), "output": int(row["output_tokens"])}
        dtype = str(row["dtype"])
        if weights := WEIGHTS.get(dtype.partition("gemm=")[2].partition(";")[0]):
            request["weights"] = weights
        # Recipes of vLLM and TensorRT-LLM for these types have such a cache; SGLang's do not.
        if dtype.startswith(("fp8", "fp4")) and engine != "sglang":
            request["kv_dtype"] = "float8_e4m3"
        keys = ("framework", "device", "model", "tp", "ep", "dp", "dtype", "batch", "input_tokens", "output_tokens")
        place = tuple(row[key] for key in keys)
        return Cell("fixed concurrency", *common, request, "tpot_s", seconds, closed_loop=True, row=place)
    if row["kind"] == "engine_step_decode":
        count = int(row["decode_requests"])
        step: Step = Decode(count, past_total=round(count * row["mean_decode_kv"]))
    else:
        count = int(row["ctx_requests"])
        step = Prefill(_shares(int(row["input_tokens"]), count))
    return Cell(
        f"single steps, {'decode' if isinstance(step, Decode) else 'prefill'}",
        *common,
        request,
        "step_s",
        seconds,
        step=step,
    )


def _shares(tokens: int, count: int) -> Sequence[int]:
    whole, more = divmod(tokens, count)
    return [whole + (i < more) for i in range(count)]


def _pipeweave(data: Path) -> Iterator[Cell]:
    """Batches of prompts of unlike length (``requests.json``: the source's workload files), medians over the runs."""
    requests = json.loads(Path(__file__).with_name("requests.json").read_text(encoding="utf-8"))
    table = pd.read_csv(data / "e2e_pipeweave.csv.gz")
    keys = ["device", "tp", "model", "workload", "batch_size", "output_len"]
    for (device, tp, model, workload, batch, output), group in table.groupby(keys):
        name = f"{workload}_{batch}"
        if model not in _PIPEWEAVE or name not in requests:
            continue
        config = str(ROOT / "examples" / "llm" / f"{_PIPEWEAVE[model]}.json")
        request = {"tp": int(tp), "batch": int(batch), "output": int(output)}
        for figure, column in _PIPEWEAVE_FIGURES.items():
            source = "mixed prompts, " + ("prefill" if figure == "ttft_s" else "total")
            seconds = float(group[column].median()) / 1e3
            common = ("sglang", _device(str(device)), str(model), config, request, figure, seconds)
            yield Cell(source, *common, lengths=tuple(requests[name]))


def _device(name: str) -> str:
    return lookup(name).name
