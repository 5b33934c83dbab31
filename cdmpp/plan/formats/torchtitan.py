"""torchtitan: split plans as parallelism and modules of a job, and jobs as ``split`` and ``simulate`` requests."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.llm import read_config
from cdmpp.llm.config import LLMConfig
from cdmpp.plan.formats.layers import LayerExporter, symbol, tensor_parallel
from cdmpp.plan.formats.megatron import exported_layout
from cdmpp.plan.formats.registry import Exported, Imported, RequestImporter, at, leaves
from cdmpp.plan.formats.transformer import PipelineJob, Training, ended, micro_batch_count
from cdmpp.plan.split.schema import SplitPlan, SplitRequest
from cdmpp.plan.training.schema import TrainingRequest
from cdmpp.predict.requests.request import Answer, Count, DeviceForm, Request
from cdmpp.utils.files import parse_toml

#: Modules of torchtitan's decoders.
EMBEDDING, NORM, OUTPUT = "tok_embeddings", "norm", "output"
_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}
#: layers, hidden, heads, kv_heads, head_dim, intermediate, vocab
_FLAVORS: dict[str, dict[str, tuple[int, int, int, int, int, int, int]]] = {
    "llama3": {
        "debugmodel": (6, 256, 16, 16, 16, 768, 2048),
        "8B": (32, 4096, 32, 8, 128, 14336, 128256),
        "70B": (80, 8192, 64, 8, 128, 28672, 128256),
        "405B": (126, 16384, 128, 8, 128, 53248, 128256),
    },
    "qwen3": {
        "debugmodel": (8, 256, 16, 8, 128, 3072, 2048),
        "0.6B": (28, 1024, 16, 8, 128, 3072, 151936),
        "1.7B": (28, 2048, 16, 8, 128, 6144, 151936),
        "4B": (36, 2560, 32, 8, 128, 9728, 151936),
        "8B": (36, 4096, 32, 8, 128, 12288, 151936),
        "14B": (40, 5120, 40, 8, 128, 17408, 151936),
        "32B": (64, 5120, 64, 8, 128, 25600, 151936),
    },
}


class TorchtitanExporter(LayerExporter):
    """Writes TOML: of a split ``[parallelism]`` with ``module_fqns_per_model_part``, of training the whole layout."""

    kinds = ("split", "training")

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """A split has 1F1B with one stage on each rank, as the plan's step is emulated."""
        if isinstance(request, TrainingRequest):
            return exported_layout(request, plan, "torchtitan")
        assert isinstance(request, SplitRequest) and isinstance(plan, SplitPlan)
        names = [layer.name for layer in request.layers for _ in range(layer.count)]
        modules = self._modules(names)
        parts = [
            [name for layer in modules[stage.first_layer : stage.last_layer + 1] for name in layer]
            for stage in plan.stages
        ]
        tp, notes = tensor_parallel(self.tp, request)
        lines = [
            "[parallelism]",
            f"tensor_parallel_degree = {tp}",
            f"pipeline_parallel_degree = {len(parts)}",
            'pipeline_parallel_schedule = "1F1B"',
            "module_fqns_per_model_part = [",
            *(f"  {json.dumps(part)}," for part in parts),
            "]\n",
        ]
        micro = f"set local_batch_size to {request.micro_batches} times pipeline_parallel_microbatch_size"
        return Exported("\n".join(lines), (micro, *notes))

    def _modules(self, names: list[str]) -> list[list[str]]:
        """Modules of each layer; the embedding, the norm and the output are added where no layer has their name."""
        symbols = [symbol(name, self.symbols) for name in names]
        if "m" in symbols:
            raise FieldError.at("layers", "torchtitan has no multi-token prediction")
        blocks = iter(range(len(names)))
        modules = [[f"layers.{next(blocks)}"] if letter == "t" else [] for letter in symbols]
        first = symbols.index("E") if "E" in symbols else 0
        last = len(names) - 1 - symbols[::-1].index("L") if "L" in symbols else len(names) - 1
        modules[first].insert(0, EMBEDDING)
        modules[last] += [NORM, OUTPUT]
        return modules


class _JobFields:
    """Values of a file, and the paths that were read."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.read: set[str] = set()

    def value(self, path: str, default: Any = None) -> Any:
        self.read.add(path)
        return at(self.tree, path, default)

    def whole(self, path: str, default: int) -> int:
        """A whole number of at least 1; -1 stands for the default, as in torchtitan."""
        value = self.value(path, default)
        if value == -1:
            return default
        if type(value) is not int or value < 1:
            raise FieldError.at(path, f"{value!r} is not a whole number of at least 1", hint="correct the file")
        return value


class TorchtitanImporter(RequestImporter):
    """Reads model, training and parallelism of a job."""

    kinds = ("split", "simulate")

    device: DeviceForm = Field(description="Device of every rank: a name, or a specification.")
    model: str | None = Field(None, description="config.json of Hugging Face; default: the flavor's dimensions.")
    dp: Count | None = Field(
        None, description="Data-parallel copies; default: the degrees of the file, or 1 where they are -1."
    )

    def read(self, text: str, kind: str) -> Imported:
        """A request with predicted costs on ``device``."""
        try:
            tree = parse_toml(text.encode())
        except ValueError as error:
            raise FieldError(f"the file is not TOML: {error}", hint="give a torchtitan configuration") from None
        fields, notes = _JobFields(tree), list[str]()
        name, flavor = fields.value("model.name", "llama3"), fields.value("model.flavor", "debugmodel")
        model = torchtitan_model(name, flavor) if self.model is None else read_config(self.model, "model")
        for degree in ("parallelism.context_parallel_degree", "parallelism.expert_parallel_degree"):
            if fields.whole(degree, 1) > 1:
                raise FieldError.at(degree, "more than 1 cannot be imported", hint="set it to 1")
        pp = fields.whole("parallelism.pipeline_parallel_degree", 1)
        run = Training(
            micro_batch=fields.whole("parallelism.pipeline_parallel_microbatch_size", 1),
            sequence=fields.whole("training.seq_len", 2048),
            tp=fields.whole("parallelism.tensor_parallel_degree", 1),
            dtype=str(fields.value("training.mixed_precision_param", "bfloat16")),
            sequence_parallel=True,
        )
        notes += run.notes()
        replicate = fields.whole("parallelism.data_parallel_replicate_degree", 1)
        shard = fields.whole("parallelism.data_parallel_shard_degree", 1)
        if at(tree, "parallelism.data_parallel_shard_degree", -1) == -1 and self.dp is None:
            notes.append("one data-parallel copy: the file leaves their number to the machines; the option dp gives it")
        if shard > 1:
            notes.append("sharding is not imported: weights, gradients and moments are whole on each rank")
        dp = self.dp or replicate * shard
        batch = fields.whole("training.local_batch_size", fields.whole("training.batch_size", 8))
        path = "training.local_batch_size"
        if fields.value("training.global_batch_size", -1) not in (-1, batch * dp):
            notes.append("gradients of several local batches are accumulated: the request has one of them")
        schedule = _schedule(fields, kind)
        stages = _stages(fields.value("parallelism.module_fqns_per_model_part"), model)
        stages = stages if stages is not None else _default_stages(fields, model, pp, schedule)
        if len(stages) % pp:
            raise FieldError.at(
                "parallelism.pipeline_parallel_degree",
                f"{len(stages)} stages are no multiple of {pp} ranks",
                hint="correct the file",
            )
        job = PipelineJob(
            model,
            run,
            pp,
            micro_batch_count(batch, run.micro_batch, 1, path),
            self.device,
            virtual=len(stages) // pp,
            dp=dp,
            schedule=schedule,
            stages=stages,
            recompute=fields.value("activation_checkpoint.mode") == "full",
        )
        if at(tree, "activation_checkpoint.mode") == "selective":
            notes.append("selective activation checkpointing is not imported: activations are kept")
        ignored = tuple(path for path in leaves(tree) if path not in fields.read)
        return job.imported(kind, ignored, notes)


def _schedule(fields: _JobFields, kind: str) -> str:
    path = "parallelism.pipeline_parallel_schedule"
    name = str(fields.value(path, "1F1B"))
    file = fields.value("parallelism.pipeline_parallel_schedule_csv")
    if kind == "split":
        return "1f1b"
    if file:
        raise FieldError.at(
            "parallelism.pipeline_parallel_schedule_csv",
            f"the schedule is in another file ({file})",
            hint="import that file with the format torch-csv, and its order as the field schedule",
        )
    if name.lower() not in _SCHEDULES:
        raise FieldError.at(path, f"{name!r} is not known", hint="known are 1F1B, GPipe and Interleaved1F1B")
    return _SCHEDULES[name.lower()]


def _stages(parts: Any, model: LLMConfig) -> list[dict[str, int]] | None:
    """Parts of each stage, from the names of its modules."""
    if parts is None:
        return None
    path = "parallelism.module_fqns_per_model_part"
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise FieldError.at(path, "not a list of lists of names", hint="correct the file")
    stages = [
        {
            "embedding": part.count(EMBEDDING),
            "block": sum(str(name).startswith("layers.") for name in part),
            "head": part.count(OUTPUT),
        }
        for part in parts
    ]
    blocks = sum(stage["block"] for stage in stages)
    if blocks != model.layers:
        raise FieldError.at(path, f"{blocks} layers, but the model has {model.layers}", hint="name each layer once")
    return stages


def _default_stages(fields: _JobFields, model: LLMConfig, pp: int, schedule: str) -> list[dict[str, int]]:
    """torchtitan's own division: embedding and output count as some layers; the first stages get one more."""
    prefix = "parallelism.pipeline_parallel_"
    first = fields.value(f"{prefix}first_stage_less_layers", 1)
    last = fields.value(f"{prefix}last_stage_less_layers", 1)
    whole = model.layers + first + last
    stages = pp * (2 if schedule == "interleaved" else 1)
    if fields.value(f"{prefix}layers_per_stage") is not None:
        stages = -(-whole // fields.whole(f"{prefix}layers_per_stage", 1))
    if stages == 1:
        return ended([{"block": model.layers}])
    per_stage, remainder = divmod(whole, stages)
    if per_stage < max(first, last, 1):
        raise FieldError.at(
            f"{prefix}degree", f"{stages} stages are too many for {model.layers} layers", hint="use fewer stages"
        )
    sizes = [per_stage + (index < remainder) for index in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return ended([{"block": size} for size in sizes])


def torchtitan_model(name: Any, flavor: Any) -> LLMConfig:
    """Dimensions of a flavor; the variants of its attention (``8B_flex``) have the same.

    Raises FieldError: the model or the flavor is not known.
    """
    flavors = _FLAVORS.get(str(name))
    plain = str(flavor).removesuffix("_attn").removesuffix("_flex").removesuffix("_varlen")
    sizes = (flavors or {}).get(plain)
    if sizes is None:
        known = "; ".join(f"{model}: {', '.join(table)}" for model, table in _FLAVORS.items())
        raise FieldError(
            f"model: the dimensions of {name!r}, flavor {flavor!r}, are not known",
            path="model.flavor",
            hint=f"known are {known}; for others give the option model, a config.json of Hugging Face",
        )
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab = sizes
    return LLMConfig(str(name), layers, hidden, vocab, heads, kv_heads, head_dim, intermediate)
