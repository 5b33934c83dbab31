"""``cdmpp support``: what a model covers, and how accurate it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from cdmpp.cli.output import JsonOption, ModelOption, device_of, percent, print_json, print_table


def support(
    model: ModelOption = None,
    device: Annotated[
        str | None, typer.Option(help="Show this device only: a name, a .json/.toml specification, or native.")
    ] = None,
    operator: Annotated[str | None, typer.Option(help="Show the coverage of this operator only.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="With --device or --operator: list untrained types too.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """List what a model covers: operators and element types by device, with domain and held-out error."""
    from cdmpp.predict.predictor import LatencyPredictor
    from cdmpp.predict.support import known_operator, selected

    predictor = LatencyPredictor.load(model)
    operator = None if operator is None else known_operator(operator)
    name = device_of(predictor.artifact, device).name if device is not None else None
    coverage = predictor.support()
    matrix = selected(coverage["matrix"], operator, name)
    if json:
        whole = operator is None and name is None
        print_json(coverage if whole else {"model_id": coverage["model_id"], "matrix": matrix})
        return
    print(f"model {coverage['model_id']}")
    if operator is not None:
        print(f"{operator}: {_fields(coverage['operators'][operator])}")
    if operator is None and name is None:
        _print_all(coverage)
        return
    trained = [every or _is_trained(row) for row in coverage["matrix"]["rows"] if operator in (None, row["operator"])]
    shown = {**matrix, "rows": [row for row, known in zip(matrix["rows"], trained, strict=True) if known]}
    hidden = [row for row, known in zip(matrix["rows"], trained, strict=True) if not known]
    if name is not None:
        _print_device(shown, name)
    else:
        _print_operator(shown)
    _print_hidden(hidden, name)


def _is_trained(row: dict[str, Any]) -> bool:
    """Whether training had the operator in these types on any device."""
    return bool(row["rows"]) or "in" in row["domain"].values()


def _print_hidden(rows: list[dict[str, Any]], device: str | None) -> None:
    """One line about the rows that are not listed."""
    from cdmpp.predict.support import domain_on

    if rows:
        labels = Counter(domain_on(row, device or "") for row in rows)
        domains = ", ".join(f"{label} {count}" for label, count in sorted(labels.items()))
        print(f"Not listed: {len(rows)} types without training rows on any device (best domain: {domains}).")
        print("--all lists them.")


def _fields(about: dict[str, Any]) -> str:
    return ", ".join(f if value == "required" else f"{f}={value}" for f, value in about["fields"].items())


def _types(row: dict[str, Any]) -> str:
    """Types as in an operator's text."""
    further = (f"{name}={row[name]}" for name in ("weight_dtype", "scaling") if row[name] is not None)
    return ",".join([row["dtype"], *further])


def _count(row: dict[str, Any], devices: Iterable[str]) -> str:
    """Training rows, "-" where the model does not say."""
    return "-" if row["rows"] is None else f"{sum(row['rows'].get(device, 0) for device in devices):,}"


def _error(row: dict[str, Any], device: str) -> str:
    return percent(row["mape"].get(device))


def _print_device(matrix: dict[str, Any], device: str) -> None:
    from cdmpp.predict.support import domain_on

    if device not in matrix["devices"]:
        print(f"{device}: no training rows; predicted by its specification")
    _print_rows(
        ("operator", "types", "domain", "training rows", "MAPE"),
        [
            (row["operator"], _types(row), domain_on(row, device), _count(row, [device]), _error(row, device))
            for row in matrix["rows"]
        ],
        right=(3, 4),
    )
    _print_note(matrix)


def _print_operator(matrix: dict[str, Any]) -> None:
    """Types by device; devices that are as any other device share one line."""
    rows = []
    for row in matrix["rows"]:
        for device, domain in row["domain"].items():
            rows.append((_types(row), device, domain, _count(row, [device]), _error(row, device)))
        rows.append((_types(row), "any other", row["elsewhere"], "-", "-"))
    _print_rows(("types", "device", "domain", "training rows", "MAPE"), rows, right=(3, 4))
    _print_note(matrix)


def _print_rows(header: Sequence[str], rows: Sequence[Sequence[str]], right: Iterable[int]) -> None:
    """A table; nothing without rows."""
    if rows:
        print_table(header, rows, right=right)


def _print_all(support: dict[str, Any]) -> None:
    matrix = support["matrix"]
    covered = []
    for row in matrix["rows"]:
        inside = [device for device, domain in row["domain"].items() if domain == "in"]
        errors = list(row["mape"].values())
        if inside:
            mean = percent(sum(errors) / len(errors)) if errors else "-"
            devices = f"{len(inside)} of {len(matrix['devices'])}"
            covered.append((row["operator"], _types(row), devices, _count(row, inside), mean, row["elsewhere"]))
    print_table(("operator", "types", "in domain on", "training rows", "MAPE", "elsewhere"), covered, right=(2, 3, 4))
    print("elsewhere: the best domain on other devices. MAPE is the mean over devices.")
    print("`--operator NAME` and `--device NAME` show each device and each type.")
    _print_note(matrix)
    names = {row[0] for row in covered}
    untrained = [name for name in support["operators"] if name not in names]
    print(f"no training rows: {', '.join(untrained)}")
    print_table(("operator", "fields"), [(name, _fields(about)) for name, about in support["operators"].items()])
    print(f"trained on: {', '.join(support['trained_devices'])} (any other device by its specification)")
    for name in ("backends", "protocols", "frameworks", "implementations"):
        print(f"{name}: {', '.join(support[name])}")
    accuracy = support["accuracy"].get("by_source", {})
    if accuracy:
        print_table(
            ("error on unseen shapes", "n", "MAPE", "median"),
            [(name, f"{m['n']:,}", percent(m["mape"]), percent(m["median_ape"])) for name, m in accuracy.items()],
            right=(1, 2, 3),
        )


def _print_note(matrix: dict[str, Any]) -> None:
    if matrix["errors_by"] == "operator" and matrix["rows"]:
        print("The error table of this model has no element types: MAPE is that of the operator in all types.")
