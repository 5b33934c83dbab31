"""Layouts of training steps as arguments of Megatron-LM and as a job of torchtitan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdmpp.errors import DataError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.training.layout import TrainingLayout
from cdmpp.llm.training.result import TrainingStep


@dataclass(frozen=True)
class LaidOut:
    """A layout of a model, with the layers of each stage and the type of its products."""

    layout: TrainingLayout
    config: LLMConfig
    layers: Sequence[int]
    products: str | None


def export_layout(step: LaidOut | TrainingStep, form: str) -> str:
    """The layout of a step as text; ``form``: "megatron" or "torchtitan"."""
    if form == "megatron":
        return _megatron(step)
    if form == "torchtitan":
        return _torchtitan(step)
    raise DataError(f"export: {form!r} is not known", hint="megatron or torchtitan")


def _megatron(step: LaidOut | TrainingStep) -> str:
    x, layers = step.layout, step.config.layers
    lines = [
        f"--tensor-model-parallel-size {x.tp}",
        f"--pipeline-model-parallel-size {x.pp}",
        f"--context-parallel-size {x.cp}",
        f"--micro-batch-size {x.micro_batch}",
        f"--global-batch-size {x.global_batch}",
        f"--seq-length {x.sequence}",
    ]
    if x.tp > 1:
        lines.append("--sequence-parallel")
    if x.virtual_pp > 1 and layers % (x.pp * x.virtual_pp) == 0:
        lines.append(f"--num-layers-per-virtual-pipeline-stage {layers // (x.pp * x.virtual_pp)}")
    elif len(set(step.layers)) > 1:
        first, *between, last = step.layers
        if {first + 1, last + 1} == set(between):
            lines += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
        else:
            lines += [f"--decoder-first-pipeline-num-layers {first}", f"--decoder-last-pipeline-num-layers {last}"]
        lines += [f"--num-virtual-stages-per-pipeline-rank {x.virtual_pp}"] if x.virtual_pp > 1 else []
    if step.config.experts is not None:
        lines += [f"--expert-model-parallel-size {x.ep}", "--expert-tensor-parallel-size 1"]
    if x.sharding != "none":
        lines.append("--use-distributed-optimizer" if x.sharding == "optimizer" else "--use-megatron-fsdp")
    if x.overlap != "none":
        lines.append("--overlap-grad-reduce")
        lines += ["--overlap-param-gather"] if x.sharding != "none" else []
    if x.overlap == "all" and x.tp > 1:
        lines.append("--tp-comm-overlap")
    if x.recompute != "none":
        lines.append(f"--recompute-granularity {x.recompute}")
        lines += ["--recompute-method uniform --recompute-num-layers 1"] if x.recompute == "full" else []
        lines += ["--recompute-modules core_attn layernorm"] if x.recompute == "selective" else []
    recipes = {"float8_e4m3": "tensorwise", "mxfp8": "mxfp8"}
    if step.products in recipes:
        lines.append(f"--fp8-format hybrid --fp8-recipe {recipes[str(step.products)]}")
    elif step.products is not None:
        lines.append("--fp4-format e2m1")
    return "\n".join(lines) + "\n"


def _torchtitan(step: LaidOut | TrainingStep) -> str:
    x = step.layout
    sharded = x.dp if x.sharding != "none" else 1
    lines = [
        "[training]",
        f"local_batch_size = {x.micro_batch if x.pp == 1 else x.micro_batch * x.micro_batches}",
        f"global_batch_size = {x.global_batch}",
        f"seq_len = {x.sequence}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {x.dp // sharded}",
        f"data_parallel_shard_degree = {sharded}",
        f"tensor_parallel_degree = {x.tp}",
        f"pipeline_parallel_degree = {x.pp}",
        f"context_parallel_degree = {x.cp}",
        f"expert_parallel_degree = {x.ep}",
    ]
    if x.pp > 1:
        schedule = "Interleaved1F1B" if x.virtual_pp > 1 else "1F1B"
        lines.append(f'pipeline_parallel_schedule = "{schedule}"')
        lines.append(f"pipeline_parallel_microbatch_size = {x.micro_batch}")
    lines += ["", "[activation_checkpoint]", f'mode = "{x.recompute}"']
    return "\n".join(lines) + "\n"
