"""Options of ``cdmpp predict``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cdmpp.cli.options import RayOption, option
from cdmpp.cli.output import DimOption, JsonOption, ModelOption
from cdmpp.programs.query_options import Backend, Framework, Implementation, Protocol


@dataclass(frozen=True)
class PredictOptions:
    """Options of programs, tables and torch modules; each of the three has some that the others do not have."""

    device: list[str] | None = option(
        None,
        "A known device (cdmpp devices), a .json/.toml specification, or native: this CPU; repeatable. A "
        "table may have a column device instead.",
        "--device",
        "-d",
    )
    protocol: Protocol | None = option(
        None,
        "What the latency includes: device alone, in a graph, from the host. Default: kernel; eager for a "
        "torch module.",
    )
    framework: Framework | None = option(
        None, "Software that launches the library kernels, if known. Default for a torch module: pytorch."
    )
    implementation: Implementation | None = option(
        None,
        "One kernel (fused), the kernels of an eager framework (composed), of a compiler, or the fastest of "
        "many candidates (tuned). Default: composed where PyTorch composes the operator, else fused.",
    )
    backend: Backend | None = option(
        None,
        "A vendor library's kernels, or TVM programs as scheduled. Default: library for operators "
        "and models, tvm for TIR.",
    )
    quantile: list[float] | None = option(
        None,
        "Levels of the interval; repeatable. Default: 0.1 and 0.9. Levels on one side of the median "
        "are columns beside the default interval.",
    )
    dim: DimOption = None
    mode: Literal["inference", "training", "forward"] | None = option(
        None,
        "Forward pass of a torch module in eval(), forward and backward pass in train(), or forward pass "
        "as the module is. Default: inference.",
    )
    execution: Literal["eager", "compiled", "cuda-graph", "compiled-graph"] | None = option(
        None,
        "Who launches a torch module's kernels: PyTorch's calls one by one, torch.compile, a captured graph, "
        "or both (reduce-overhead). Default: eager, or as torch.compile made the module; with --protocol the "
        "kernels are summed.",
    )
    host: str | None = option(None, "Host profile of a torch module: a name or a .toml file. Default: by device.")
    example: list[str] | None = option(
        None,
        "Example input of a torch module, such as 8,3,224,224 or input_ids=1,128:int64; repeatable. Default: "
        "those that the factory returns.",
        "--input",
        metavar="[NAME=]SHAPE[:TYPE]",
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = option(
        None, "Cast a torch module and its inputs to this type."
    )
    autocast: Literal["float16", "bfloat16"] | None = option(None, "Run products of a torch module in this type.")
    optimizer: Literal["sgd", "adam", "adamw"] | None = option(
        None, "Add the update of the parameters to a training step."
    )
    model: ModelOption = None
    strict: bool = option(False, "Exit with code 3 when a total leaves something out.", "--strict")
    out: Path | None = option(None, "Answers of a table: .csv or .parquet; default: CSV on stdout.", metavar="FILE")
    url: str | None = option(
        None,
        "The service at this address predicts the table or torch module, not a local model; CDMPP_API_KEY has its key.",
    )
    ray: RayOption = None
    verbose: bool = option(False, "With several devices: details of each program and device too.", "--verbose", "-v")
    json: JsonOption = False

    def flags(self, *names: str) -> list[str]:
        """Flags of those of these options that were given."""
        given = [name for name in names if getattr(self, name) or (name == "ray" and self.ray is not None)]
        return ["--input" if name == "example" else f"--{name}" for name in given]
