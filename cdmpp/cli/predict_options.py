"""Options of ``cdmpp predict``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cdmpp.cli.options import RayOption
from cdmpp.cli.output import DimOption, JsonOption, ModelOption
from cdmpp.programs.query_options import Backend, Framework, Implementation, Protocol


@dataclass(frozen=True)
class PredictOptions:
    """Options of programs, tables and torch modules; each of the three has some that the others do not have."""

    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            "-d",
            help="A known device (cdmpp devices), a .json/.toml specification, or native: this CPU; repeatable. A "
            "table may have a column device instead.",
        ),
    ] = None
    protocol: Annotated[
        Protocol | None,
        typer.Option(
            help="What the latency includes: device alone, in a graph, from the host. Default: kernel; eager for a "
            "torch module."
        ),
    ] = None
    framework: Annotated[
        Framework | None,
        typer.Option(help="Software that launches the library kernels, if known. Default for a torch module: pytorch."),
    ] = None
    implementation: Annotated[
        Implementation | None,
        typer.Option(
            help="One kernel (fused), the kernels of an eager framework (composed), of a compiler, or the fastest of "
            "many candidates (tuned). Default: composed where PyTorch composes the operator, else fused."
        ),
    ] = None
    backend: Annotated[
        Backend | None,
        typer.Option(
            help="A vendor library's kernels, or TVM programs as scheduled. Default: library for operators "
            "and models, tvm for TIR."
        ),
    ] = None
    quantile: Annotated[
        list[float] | None,
        typer.Option(
            help="Levels of the interval; repeatable. Default: 0.1 and 0.9. Levels on one side of the median "
            "are columns beside the default interval."
        ),
    ] = None
    dim: DimOption = None
    mode: Annotated[
        Literal["inference", "training", "forward"] | None,
        typer.Option(
            help="Forward pass of a torch module in eval(), forward and backward pass in train(), or forward pass "
            "as the module is. Default: inference."
        ),
    ] = None
    execution: Annotated[
        Literal["eager", "compiled", "cuda-graph", "compiled-graph"] | None,
        typer.Option(
            help="Who launches a torch module's kernels: PyTorch's calls one by one, torch.compile, a captured graph, "
            "or both (reduce-overhead). Default: eager, or as torch.compile made the module; with --protocol the "
            "kernels are summed."
        ),
    ] = None
    host: Annotated[
        str | None, typer.Option(help="Host profile of a torch module: a name or a .toml file. Default: by device.")
    ] = None
    example: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="[NAME=]SHAPE[:TYPE]",
            help="Example input of a torch module, such as 8,3,224,224 or input_ids=1,128:int64; repeatable. Default: "
            "those that the factory returns.",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Cast a torch module and its inputs to this type."),
    ] = None
    autocast: Annotated[
        Literal["float16", "bfloat16"] | None, typer.Option(help="Run products of a torch module in this type.")
    ] = None
    optimizer: Annotated[
        Literal["sgd", "adam", "adamw"] | None,
        typer.Option(help="Add the update of the parameters to a training step."),
    ] = None
    model: ModelOption = None
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 3 when a total leaves something out.")] = (
        False
    )
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answers of a table: .csv or .parquet; default: CSV on stdout.")
    ] = None
    url: Annotated[
        str | None,
        typer.Option(
            help="The service at this address predicts the table or torch module, not a local model; CDMPP_API_KEY has "
            "its key."
        ),
    ] = None
    ray: RayOption = None
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With several devices: details of each program and device too.")
    ] = False
    json: JsonOption = False

    def flags(self, *names: str) -> list[str]:
        """Flags of those of these options that were given."""
        given = [name for name in names if getattr(self, name) or (name == "ray" and self.ray is not None)]
        return ["--input" if name == "example" else f"--{name}" for name in given]
