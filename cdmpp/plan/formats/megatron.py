"""Megatron-LM: its arguments as ``split`` and ``simulate`` requests, and plans as its pipeline layout."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.forms import LayoutRow
from cdmpp.llm.read import read_config
from cdmpp.llm.training.export import LaidOut, export_layout
from cdmpp.llm.training.layout import TrainingLayout
from cdmpp.plan.formats.layers import LayerExporter, layout_text, parse_layout, symbol, tensor_parallel
from cdmpp.plan.formats.registry import Exported, Imported, PlanExporter, RequestImporter
from cdmpp.plan.formats.text import CommandOptions, assumptions, line, options
from cdmpp.plan.formats.transformer import PipelineJob, Training, micro_batch_count
from cdmpp.plan.multimodal.schema import MultimodalPlan
from cdmpp.plan.split.schema import SplitPlan, SplitRequest
from cdmpp.plan.training.schema import TrainingRequest, TrainingStepPlan
from cdmpp.predict.requests.request import Answer, Count, DeviceForm, Request

#: Parts of Megatron that change the costs and that no request of these planners has.
_REFUSED = {
    "num-experts": "layers of experts",
    "multi-latent-attention": "latent attention",
    "spec": "a layer specification",
    "fp4-format": "training in FP4",
}
#: Scaling of the FP8 products of each recipe (Transformer Engine). The first one is Megatron's default.
_FP8_SCALINGS = {"delayed": "tensor", "tensorwise": "tensor", "blockwise": "block128", "mxfp8": "mx32"}
#: Arguments that repeat what others say.
_IMPLIED = ("max-position-embeddings", "use-mcore-models", "position-embedding-type")


class MegatronImporter(RequestImporter):
    """Reads the text of a shell line, a script or a file of arguments."""

    kinds = ("split", "simulate")

    device: DeviceForm = Field(description="Device of every rank: a name, or a specification.")
    dp: Count | None = Field(
        None, description="Data-parallel copies; default: from torchrun's processes and nodes, or 1."
    )
    vocab: Count | None = Field(None, description="Rows of the embedding, where the file has no vocab-size.")

    def read(self, text: str, kind: str) -> Imported:
        """A request with predicted costs on ``device``."""
        args = CommandOptions({name.replace("_", "-"): value for name, value in options(text).items()})
        for name, meaning in _REFUSED.items():
            if name in args.remaining:
                raise FieldError.at(
                    f"--{name}", f"{meaning} cannot be imported", hint="write the layers by hand (docs/pipelines.md)"
                )
        if (args.whole("context-parallel-size") or 1) > 1:
            raise FieldError.at("--context-parallel-size", "context parallelism cannot be imported", hint="remove it")
        notes: list[str] = []
        tp = args.whole("tensor-model-parallel-size", 1) or 1
        model = self._model(args, tp, notes)
        run = Training(
            micro_batch=_needed(args, "micro-batch-size"),
            sequence=_needed(args, "seq-length"),
            tp=tp,
            dtype=_dtype(args, notes),
            sequence_parallel=args.flag("sequence-parallel"),
            fp8_scaling=_fp8_scaling(args, notes),
            fp8_weight_gradient=not args.flag("no-fp8-wgrad"),
        )
        notes += run.notes()
        pp = args.whole("pipeline-model-parallel-size", 1) or 1
        dp = self._copies(args, run.tp * pp, notes)
        batch = args.whole("global-batch-size")
        if batch is None:
            notes.append("no --global-batch-size: one micro-batch for each copy, as in Megatron")
        micro_batches = 1 if batch is None else micro_batch_count(batch, run.micro_batch, dp, "--global-batch-size")
        stages, virtual = _stages(args, model.layers, pp)
        job = PipelineJob(
            model,
            run,
            pp,
            micro_batches,
            self.device,
            virtual=virtual,
            dp=dp,
            schedule="interleaved" if virtual > 1 else "1f1b",
            stages=stages,
            recompute=args.text("recompute-granularity") == "full",
        )
        notes += assumptions("arguments", "Megatron", args.assumed)
        for name in _IMPLIED:
            args.remaining.pop(name, None)
        return job.imported(kind, args.ignored(), notes)

    def _model(self, args: CommandOptions, tp: int, notes: list[str]) -> LLMConfig:
        hidden, heads = _needed(args, "hidden-size"), _needed(args, "num-attention-heads")
        gated = args.flag("swiglu")
        grouped = args.flag("group-query-attention")
        kv_heads = (args.whole("num-query-groups", 1) or 1) if grouped else heads
        vocab = args.whole("padded-vocab-size") or args.whole("vocab-size") or self.vocab or 0
        if not vocab:
            raise FieldError.at("--vocab-size", "missing", hint="give the option vocab: rows of the embedding")
        divisor = (args.whole("make-vocab-size-divisible-by") or 128) * tp
        padded = -(-vocab // divisor) * divisor
        if padded != vocab:
            notes.append(f"the embedding has {padded} rows: {vocab}, padded to a multiple of {divisor}")
        # Megatron: 4 h, and for a gated layer two thirds of it, rounded down to a multiple of 64.
        default = hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
        return LLMConfig(
            "megatron",
            layers=_needed(args, "num-layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=args.whole("kv-channels", hidden // heads) or 1,
            intermediate=args.whole("ffn-hidden-size", default) or default,
            vocab=padded,
            gated=gated,
        )

    def _copies(self, args: CommandOptions, ranks: int, notes: list[str]) -> int:
        processes = args.whole("nproc-per-node")
        machines = args.whole("nnodes", 1) or 1
        if self.dp is not None:
            return self.dp
        if processes is None:
            notes.append("one data-parallel copy: the text has no --nproc-per-node; the option dp gives others")
            return 1
        if processes * machines % ranks:
            raise FieldError.at(
                "--nproc-per-node",
                f"{processes * machines} processes are no multiple of {ranks} tensor-parallel and pipeline ranks",
                hint="correct the sizes, or give the option dp",
            )
        return processes * machines // ranks


def _needed(args: CommandOptions, name: str) -> int:
    value = args.whole(name)
    if value is None:
        raise FieldError.at(f"--{name}", "missing", hint="add it to the arguments")
    return value


def _dtype(args: CommandOptions, notes: list[str]) -> Literal["float16", "bfloat16"]:
    half, brain = args.flag("fp16"), args.flag("bf16")
    if not half and not brain:
        notes.append("neither --fp16 nor --bf16: bfloat16 is assumed (Megatron would train in float32)")
    return "float16" if half else "bfloat16"


def _fp8_scaling(args: CommandOptions, notes: list[str]) -> str | None:
    """Scaling of the FP8 products; None where the arguments have no FP8 format."""
    file_format, recipe = args.text("fp8-format"), args.text("fp8-recipe", next(iter(_FP8_SCALINGS)))
    if file_format is None:
        return None
    for name, value, known in (
        ("fp8-format", file_format, ("e4m3", "hybrid")),
        ("fp8-recipe", recipe, tuple(_FP8_SCALINGS)),
    ):
        if value not in known:
            raise FieldError.at(f"--{name}", f"{value!r} cannot be imported", hint="known are " + ", ".join(known))
    notes.append(
        "FP8: the linear layers of the blocks compute in float8_e4m3, gradients too; attention, norms, head and the "
        "memory of activations stay 16-bit"
    )
    return _FP8_SCALINGS[str(recipe)]


def _stages(args: CommandOptions, layers: int, pp: int) -> tuple[list[dict[str, int]] | None, int]:
    """Parts of each stage, where a layout gives them, and the stages on each rank."""
    layout = args.text("pipeline-model-parallel-layout")
    virtual = args.whole("num-virtual-stages-per-pipeline-rank") or 1
    chunk = args.whole("num-layers-per-virtual-pipeline-stage")
    if chunk is not None:
        if layers % (chunk * pp):
            raise FieldError.at(
                "--num-layers-per-virtual-pipeline-stage",
                f"{layers} layers are no multiple of {chunk} x {pp} ranks",
                hint="correct the sizes",
            )
        virtual = layers // (chunk * pp)
    if layout is None:
        return None, virtual
    symbols = parse_layout(layout)
    name = "pipeline-model-parallel-layout"
    wrong = ""
    if len(symbols) % pp:
        wrong = f"{len(symbols)} stages are no multiple of {pp} ranks"
    elif "m" in layout:
        wrong = "layers of multi-token prediction (m) cannot be imported"
    elif "".join(symbols) != "E" + "t" * layers + "L":
        wrong = f"its layers are not E, {layers} decoder layers, L"
    if wrong:
        raise FieldError.at(f"--{name}", wrong, hint="correct the layout")
    parts: list[dict[str, Any]] = [
        {"embedding": stage.count("E"), "block": stage.count("t"), "head": stage.count("L")} for stage in symbols
    ]
    return parts, len(symbols) // pp


class MegatronLayoutExporter(LayerExporter):
    """Writes arguments, one on each line."""

    kinds = ("split", "pipeline")

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """Sizes and layout; the number of stages divided by the ranks is the virtual size."""
        if isinstance(plan, MultimodalPlan):
            stages, ranks, notes = _segments(plan)
        elif isinstance(plan, SplitPlan) and isinstance(request, SplitRequest):
            stages, ranks, notes = self._stages(request, plan)
        else:
            raise FieldError.at(
                "models",
                "a fused pipeline has equal stages without layers",
                hint="a split plan, or a pipeline plan of one module, has layers",
            )
        tp, more = tensor_parallel(self.tp, request)
        flat = "".join(stages)
        text = line(
            [
                ("tensor-model-parallel-size", tp),
                ("pipeline-model-parallel-size", ranks),
                ("num-layers", flat.count("t")),
                ("mtp-num-layers", flat.count("m") or None),
                ("pipeline-model-parallel-layout", layout_text(stages)),
            ]
        )
        virtual = len(stages) // ranks
        sizes = f"tp {tp}, pp {ranks}, vp {virtual}: Megatron derives vp from the {len(stages)} stages of the layout"
        return Exported(text, (sizes, *more, *notes))

    def _stages(self, request: SplitRequest, plan: SplitPlan) -> tuple[list[str], int, list[str]]:
        names = [layer.name for layer in request.layers for _ in range(layer.count)]
        symbols = [symbol(name, self.symbols) for name in names]
        while symbols[:2] == ["E", "E"] and plan.stages[0].last_layer >= 1:  # token and position embedding
            symbols[:2] = ["", "E"]
        stages = ["".join(symbols[stage.first_layer : stage.last_layer + 1]) for stage in plan.stages]
        flat, notes = "".join(stages), []
        left_out = sorted({name for name, letter in zip(names, symbols, strict=True) if not letter and name})
        if left_out:
            notes.append(f"not in the layout: {', '.join(left_out)}; Megatron places them with E or with the last t")
        if "E" not in flat:
            stages[0] = "E" + stages[0]
            notes.append("no layer is called an embedding: E is added to the first stage")
        if "L" not in flat:
            stages[-1] += "L"
            notes.append("no layer is called a head: L is added to the last stage")
        _check_order("".join(stages), names)
        if [stage.rank for stage in plan.stages] != list(range(len(stages))):
            order = ", ".join(f"{stage.stage} on {stage.rank}" for stage in plan.stages)
            notes.append(f"Megatron runs stage i on rank i; the plan has stages on other ranks of the request: {order}")
        return stages, len(stages), notes


def _check_order(flat: str, names: list[str]) -> None:
    """Raise FieldError unless a layout is E, decoder layers, m, L."""
    if flat.strip("E").rstrip("L").strip("m").strip("t") or flat.count("E") != 1 or flat.count("L") != 1:
        raise FieldError.at(
            "layers",
            f"Megatron's layout is E, decoder layers, L; these layers give {layout_text([flat])}",
            hint='give the symbol of each name, such as symbols={"' + next(iter(names), "") + '": "t"}',
        )


def _segments(plan: MultimodalPlan) -> tuple[list[str], int, list[str]]:
    modules = {entry.module for entry in plan.layout}
    if len(modules) > 1:
        raise FieldError.at(
            "modules",
            f"a layout has the layers of one decoder, the plan has {', '.join(sorted(modules))}",
            hint="plan one module",
        )
    ranks = 1 + max(entry.rank for entry in plan.layout)
    if [entry.rank for entry in plan.layout] != [i % ranks for i in range(len(plan.layout))]:
        order = " ".join(str(entry.rank) for entry in plan.layout)
        raise FieldError.at(
            "layout",
            f"Megatron places stage i on rank i modulo {ranks}; the plan has ranks {order}",
            hint="plan with fewer segments",
        )
    stages = ["t" * entry.layers for entry in plan.layout]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return stages, ranks, ["the plan has no embedding and no head: E is in the first stage, L in the last one"]


class MegatronExporter(PlanExporter):
    """Writes arguments of parallelism, batch and recomputation."""

    kinds = ("training",)

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """The layout of the plan."""
        return exported_layout(request, plan, "megatron")


def exported_layout(request: Request[Any], plan: Answer, form: str) -> Exported:
    """The layout of a training plan as text; its buckets are notes."""
    assert isinstance(request, TrainingRequest) and isinstance(plan, TrainingStepPlan)
    names = [name for name in TrainingLayout.__dataclass_fields__ if name in LayoutRow.model_fields]
    sizes = request.model_dump(include={"gpus", "global_batch", "sequence"})
    layout = TrainingLayout(**sizes, **plan.layout.model_dump(include=set(names)))
    step = LaidOut(layout, read_config(request.model), plan.layout.layers, request.products)
    compressed = sum(bucket.compressor is not None for bucket in plan.buckets)
    note = f"{len(plan.buckets)} exchanges of gradients, {compressed} of them compressed, are not in the file"
    return Exported(export_layout(step, form), (note,) if plan.buckets else ())
