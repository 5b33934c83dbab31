"""Serving under load, simulated, against measured times to first token and between tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.markdown import percent, table
from benchmarks.serving_truth.cells import Cell, configs_by_name, read_cells, read_table
from cdmpp.devices.registry import lookup
from cdmpp.errors import CdmppError
from cdmpp.llm import ServingResult, read_config
from cdmpp.llm.engines import load_engine
from cdmpp.llm.serving.simulate import ServingPlan
from cdmpp.predict.interface import Predictor

#: Requests of each client in the published runs; requests of a simulated one, at most.
EACH, MOST = 10, 1500
_OPEN_LOOP = {
    "meta-llama/Llama-3.1-8B": {"tp": 1},
    "Qwen/Qwen3-32B": {"tp": 2},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": {"tp": 1, "ep": 2, "dp": 2},
}


def run(data: Path, configs: Path, predictor: Predictor) -> dict[str, Any]:
    """Errors at fixed concurrency by engine, device and model, and of requests with Poisson arrivals."""
    measured = _first_tokens(data)
    groups: dict[tuple[str, str, str], list[tuple[float, ...]]] = defaultdict(list)
    left_out = Counter[str]()
    for cell in read_cells(data, configs):
        if not cell.closed_loop:
            continue
        try:
            result = _closed_loop(cell, predictor)
        except CdmppError as error:
            left_out["architecture not known" if "is not known" in error.message else "does not fit"] += 1
            continue
        ttft_s = measured.get(cell.row, np.nan)
        # The published mean: the first requests of all clients, and all later ones.
        later_s, tpot_s = (float(result.measured(name).mean()) for name in ("ttft_s", "tpot_s"))
        first_s = (float(result.ttft_s[: cell.batch].mean()) + (EACH - 1) * later_s) / EACH
        inside = [
            result.bounds[name][0] <= mean_s <= result.bounds[name][1]
            for name, mean_s in (("tpot_s", cell.seconds), ("ttft_s", later_s * ttft_s / first_s))
        ]
        groups[cell.engine, cell.device, cell.model].append((tpot_s / cell.seconds - 1, first_s / ttft_s - 1, *inside))
    rows = []
    for (engine, device, model), errors in sorted(groups.items()):
        tpot, ttft, tpot_in, ttft_in = np.array(errors, dtype=np.float64).T
        rows.append(
            {
                "engine": engine,
                "device": device,
                "model": model,
                "rows": len(errors),
                "tpot": float(np.abs(tpot).mean()),
                "tpot_bias": float(np.median(tpot)),
                "ttft_median": float(np.nanmedian(np.abs(ttft))),
                "ttft_bias": float(np.nanmedian(ttft)),
                "tpot_covered": float(tpot_in.mean()),
                "ttft_covered": float(ttft_in[~np.isnan(ttft)].mean()),
            }
        )
    every = np.array([error for errors in groups.values() for error in errors], dtype=np.float64)
    return {
        "groups": rows,
        "tpot": float(np.abs(every[:, 0]).mean()),
        "ttft_median": float(np.nanmedian(np.abs(every[:, 1]))),
        "tpot_covered": float(every[:, 2].mean()),
        "ttft_covered": float(every[~np.isnan(every[:, 1]), 3].mean()),
        "answered": len(every),
        "left_out": dict(left_out),
        "open_loop": list(_open_loop(data, configs, predictor)),
    }


def _closed_loop(cell: Cell, predictor: Predictor) -> ServingResult:
    request = {name: value for name, value in cell.request.items() if name != "batch"}
    count = min(EACH * cell.batch, max(3 * cell.batch, MOST))
    plan = ServingPlan(
        read_config(cell.config),
        lookup(cell.device),
        engine=cell.engine,
        concurrency=cell.batch,
        count=count,
        **request,
    )
    return plan.run(predictor.model_id, predictor.predict_queries(plan.queries))


def _first_tokens(data: Path) -> dict[tuple[Any, ...], float]:
    """Seconds to the first token by the cell's keys."""
    table = read_table(data)
    table = table[(table.kind == "closed_loop_agg") & (table.quantity == "ttft_ms")]
    keys = ["framework", "device", "model", "tp", "ep", "dp", "dtype", "batch", "input_tokens", "output_tokens"]
    return {key: float(group.value.median()) / 1e3 for key, group in table.groupby(keys)}


def _open_loop(data: Path, configs: Path, predictor: Predictor) -> Iterator[dict[str, Any]]:
    table = read_table(data)
    table = table[table.kind == "open_loop_request"]
    alias = configs_by_name(configs)
    for model, layout in _OPEN_LOOP.items():
        rows = table[table.model == model].pivot_table(
            index=["request", "arrival_s", "input_tokens", "output_tokens"], columns="quantity", values="value"
        )
        rows = rows.reset_index().sort_values("arrival_s")
        arrivals = rows.arrival_s - rows.arrival_s.min()
        requests = list(zip(arrivals, rows.input_tokens.astype(int), rows.output_tokens.astype(int), strict=True))
        first = table[table.model == model].iloc[0]
        engine = load_engine("vllm").model_copy(
            update={"token_budget": int(first.max_num_batched_tokens), "max_sequences": int(first.max_num_seqs)}
        )
        plan = ServingPlan(
            read_config(configs / alias[model]),
            lookup("rtx-pro-6000-server"),
            engine=engine,
            requests=requests,
            **layout,
        )
        result = plan.run(predictor.model_id, predictor.predict_queries(plan.queries))
        ttft_ms = rows.first_token_minus_scheduled_ms + rows.queue_time_ms
        yield {
            "model": model,
            "requests": len(rows),
            "tpot_s": float(rows.tpot_ms.mean()) / 1e3,
            "predicted_tpot_s": float(result.tpot_s.mean()),
            "ttft_s": float(ttft_ms.mean()) / 1e3,
            "predicted_ttft_s": float(result.ttft_s.mean()),
        }


def pages(served: dict[str, Any]) -> dict[str, str]:
    """Parts of the page."""
    header = [
        *("engine", "device", "model", "rows", "time per token, mean error"),
        *("bias", "80 % interval covers", "time to first token, median error", "bias", "80 % interval covers"),
    ]
    rows = [
        [
            *(row[name] for name in ("engine", "device", "model")),
            f"{row['rows']:,}",
            f"**{percent(row['tpot'])}**",
            f"{100 * row['tpot_bias']:+.0f} %",
            percent(row["tpot_covered"], 0),
            f"**{percent(row['ttft_median'])}**",
            f"{100 * row['ttft_bias']:+.0f} %",
            percent(row["ttft_covered"], 0),
        ]
        for row in served["groups"]
    ]
    total = ["all", "", "", f"{served['answered']:,}", percent(served["tpot"]), "", percent(served["tpot_covered"], 0)]
    total += [percent(served["ttft_median"]), "", percent(served["ttft_covered"], 0)]
    header_open = [
        *("model", "requests", "time per token, measured", "predicted"),
        *("error", "to first token, measured", "predicted", "error"),
    ]
    open_rows = []
    for row in served["open_loop"]:
        cells = [row["model"].rpartition("/")[2], str(row["requests"])]
        for name in ("tpot_s", "ttft_s"):
            measured, predicted = row[name], row[f"predicted_{name}"]
            cells += [
                f"{1e3 * measured:,.1f} ms",
                f"{1e3 * predicted:,.1f} ms",
                f"{100 * (predicted / measured - 1):+.0f} %",
            ]
        open_rows.append(cells)
    return {"served": table(header, [*rows, total], left=3), "open_loop": table(header_open, open_rows)}
