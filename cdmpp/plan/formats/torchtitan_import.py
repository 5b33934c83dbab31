"""A torchtitan job (TOML of versions up to 0.2) as ``split`` and ``simulate`` requests."""

from __future__ import annotations

import tomllib
from typing import Annotated, Any

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.formats import Imported, Importer, at, leaves
from cdmpp.plan.formats.torchtitan import EMBEDDING, OUTPUT
from cdmpp.plan.formats.torchtitan_models import torchtitan_model
from cdmpp.plan.formats.training_import import Job, micro_batch_count
from cdmpp.plan.formats.transformer import Training, ended
from cdmpp.predict.llm import read_config
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.requests.request import Count, DeviceForm

_SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved1f1b": "interleaved"}


class _Fields:
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
            wrong = f"{path}: {value!r} is not a whole number of at least 1"
            raise FieldError(wrong, path=path, hint="correct the file")
        return value


class TorchtitanImporter(Importer):
    """Reads model, training and parallelism of a job."""

    kinds = ("split", "simulate")

    device: Annotated[DeviceForm, Field(description="Device of every rank: a name, or a specification.")]
    model: Annotated[
        str | None, Field(description="config.json of Hugging Face; default: the flavor's dimensions.")
    ] = None
    dp: Annotated[
        Count | None,
        Field(description="Data-parallel copies; default: the degrees of the file, or 1 where they are -1."),
    ] = None

    def read(self, text: str, kind: str) -> Imported:
        """A request with predicted costs on ``device``."""
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise FieldError(f"the file is not TOML: {error}", hint="give a torchtitan configuration") from None
        fields, notes = _Fields(tree), list[str]()
        name, flavor = fields.value("model.name", "llama3"), fields.value("model.flavor", "debugmodel")
        model = torchtitan_model(name, flavor) if self.model is None else read_config(self.model, "model")
        for degree in ("parallelism.context_parallel_degree", "parallelism.expert_parallel_degree"):
            if fields.whole(degree, 1) > 1:
                raise FieldError(f"{degree}: more than 1 cannot be imported", path=degree, hint="set it to 1")
        pp = fields.whole("parallelism.pipeline_parallel_degree", 1)
        run = Training(
            micro_batch=fields.whole("parallelism.pipeline_parallel_microbatch_size", 1),
            sequence=fields.whole("training.seq_len", 2048),
            tp=fields.whole("parallelism.tensor_parallel_degree", 1),
            dtype=str(fields.value("training.mixed_precision_param", "bfloat16")),
            sequence_parallel=True,
        )
        if run.tp > 1:
            notes.append("sequence parallelism is priced as all-reduces of the same bytes")
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
            raise FieldError(
                f"parallelism.pipeline_parallel_degree: {len(stages)} stages are no multiple of {pp} ranks",
                path="parallelism.pipeline_parallel_degree",
                hint="correct the file",
            )
        job = Job(
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


def _schedule(fields: _Fields, kind: str) -> str:
    path = "parallelism.pipeline_parallel_schedule"
    name = str(fields.value(path, "1F1B"))
    file = fields.value("parallelism.pipeline_parallel_schedule_csv")
    if kind == "split":
        return "1f1b"
    if file:
        raise FieldError(
            f"parallelism.pipeline_parallel_schedule_csv: the schedule is in another file ({file})",
            path="parallelism.pipeline_parallel_schedule_csv",
            hint="import that file with the format torch-csv, and its order as the field schedule",
        )
    if name.lower() not in _SCHEDULES:
        raise FieldError(f"{path}: {name!r} is not known", path=path, hint="known are 1F1B, GPipe and Interleaved1F1B")
    return _SCHEDULES[name.lower()]


def _stages(parts: Any, model: LLMConfig) -> list[dict[str, int]] | None:
    """Parts of each stage, from the names of its modules."""
    if parts is None:
        return None
    path = "parallelism.module_fqns_per_model_part"
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise FieldError(f"{path}: not a list of lists of names", path=path, hint="correct the file")
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
        raise FieldError(
            f"{path}: {blocks} layers, but the model has {model.layers}", path=path, hint="name each layer once"
        )
    return stages


def _default_stages(fields: _Fields, model: LLMConfig, pp: int, schedule: str) -> list[dict[str, int]]:
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
    each, more = divmod(whole, stages)
    if each < max(first, last, 1):
        raise FieldError(
            f"{prefix}degree: {stages} stages are too many for {model.layers} layers",
            path=f"{prefix}degree",
            hint="use fewer stages",
        )
    sizes = [each + (index < more) for index in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return ended([{"block": size} for size in sizes])
