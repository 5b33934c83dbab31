"""Pools of a veRL job: YAML, or overrides of its command line.

The keys are those of veRL 0.9 (``verl/trainer/config``, trainer ``v1``). A shared plan is the trainer mode ``sync``, in
which rollout and trainer have the same GPUs. Separate pools are the mode ``separate_async`` without hybrid engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.plan.formats.formats import Exported, Imported, at, leaves, put
from cdmpp.plan.formats.rl_pools import RlExporter, RlImporter, rl_request
from cdmpp.plan.formats.shell import overrides
from cdmpp.plan.formats.yaml_text import read_yaml, write_yaml
from cdmpp.predict.requests.fields import MAX_COUNT
from cdmpp.predict.requests.request import Answer, Request

_ROLLOUT = "actor_rollout_ref.rollout"
_MODE = "trainer.v1.trainer_mode"
_VERSIONS = "trainer.v1.sampler.max_off_policy_threshold"


class VerlExporter(RlExporter):
    """Writes YAML: a part of a configuration, for Hydra's ``--config-name`` with ``ppo_trainer`` as default."""

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """Nodes and GPUs of rollout and trainer, sizes of a step, staleness."""
        rl, rl_plan, pools = self.pools(request, plan)
        generation, training, prompts = pools.generation, pools.training, self.prompts(rl)
        notes = list(pools.notes)
        values: dict[str, Any] = {
            "trainer.nnodes": training.nodes,
            "trainer.n_gpus_per_node": training.node_gpus,
            "trainer.use_v1": True,
            _MODE: "sync" if pools.shared else "separate_async",
            "actor_rollout_ref.hybrid_engine": pools.shared,
            f"{_ROLLOUT}.tensor_model_parallel_size": pools.tp,
            f"{_ROLLOUT}.nnodes": 0 if pools.shared else generation.nodes,
            f"{_ROLLOUT}.n_gpus_per_node": generation.node_gpus,
            f"{_ROLLOUT}.n": self.samples_per_prompt,
            f"{_ROLLOUT}.max_num_seqs": rl.kv.max_batch,
            "data.train_batch_size": prompts,
            "data.max_response_length": rl_plan.lengths.limit,
        }
        if rl.prompt_tokens:
            values["data.max_prompt_length"] = rl.prompt_tokens
        if not pools.shared:
            stale = 0 if rl_plan.streaming is None else rl_plan.streaming.staleness
            values |= {
                "trainer.v1.separate_async.parameter_sync_step": 1,
                "actor_rollout_ref.actor.ppo_mini_batch_size": prompts,
                f"{_ROLLOUT}.checkpoint_engine.backend": "nccl",
                _VERSIONS: None if stale is None else stale + 1,
                "trainer.v1.sampler.max_off_policy_strategy": "wait",
            }
            if stale == 0:
                notes.append("veRL trains separate pools asynchronously: one version of the weights in a trajectory")
        tree: dict[str, Any] = {}
        for path, value in values.items():
            put(tree, path, value)
        return Exported(write_yaml(tree), tuple(notes))


class VerlImporter(RlImporter):
    """Reads YAML, or a shell line with overrides such as ``data.train_batch_size=256``."""

    def read(self, text: str, kind: str) -> Imported:
        """Pools, samples, and lengths of prompt and response."""
        tree, given = _tree(text)
        used: set[str] = set()

        def whole(path: str, default: int | None = None, least: int = 1) -> int | None:
            used.add(path)
            value = at(tree, path, default)
            if value is None or (isinstance(value, str) and value.startswith("${")):
                return default
            try:
                number = int(str(value))
            except ValueError:
                number = -1
            if not least <= number <= MAX_COUNT:
                raise FieldError(
                    f"{path}: {str(value)[:80]!r} is not a whole number from {least} to {MAX_COUNT}",
                    path=path,
                    hint="correct the file",
                )
            return number

        tp = 1
        for size in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
            tp *= whole(f"{_ROLLOUT}.{size}", 2 if size.startswith("tensor") else 1) or 1
        trainer = (whole("trainer.nnodes", 1) or 1) * (whole("trainer.n_gpus_per_node", 8) or 8)
        per_node = whole(f"{_ROLLOUT}.n_gpus_per_node", whole("trainer.n_gpus_per_node", 8)) or 8
        used |= {_MODE, "trainer.use_v1", "actor_rollout_ref.hybrid_engine"}
        rollout = (whole(f"{_ROLLOUT}.nnodes", 0, least=0) or 0) * per_node
        mode = at(tree, _MODE, "sync")
        separate = mode == "separate_async"
        if separate and not rollout:
            raise FieldError(
                f"{_ROLLOUT}.nnodes: 0, and the mode is {mode}",
                path=f"{_ROLLOUT}.nnodes",
                hint="give the rollout's nodes",
            )
        if separate and at(tree, "actor_rollout_ref.hybrid_engine", True) is not False:
            raise FieldError(
                "actor_rollout_ref.hybrid_engine: true with separate_async lets the trainer's GPUs generate too",
                path="actor_rollout_ref.hybrid_engine",
                hint="an rl request has no such layout; set hybrid_engine to false",
            )
        versions = whole(_VERSIONS) if separate else None
        request = rl_request(
            generation=_units(rollout if separate else trainer, tp, "rollout"),
            training=_units(trainer, tp, "trainer") if separate else None,
            samples=(whole("data.train_batch_size", 1024) or 1) * (whole(f"{_ROLLOUT}.n", 1) or 1),
            prompt_tokens=whole("data.max_prompt_length", 512),
            max_tokens=whole("data.max_response_length", 512),
            max_batch=whole(f"{_ROLLOUT}.max_num_seqs"),
            staleness=None if versions is None else versions - 1,
        )
        notes = [f"a unit has {tp} GPUs, those of a rollout replica", "missing keys have veRL's defaults"]
        if mode == "colocate_async":
            notes.append("colocate_async is read as sync: an rl request has no generation beside training on one GPU")
        used.add("actor_rollout_ref.model.path")
        ignored = tuple(path for path in given if path not in used)
        return self.imported(request, tp, at(tree, "actor_rollout_ref.model.path"), ignored, notes)


def _tree(text: str) -> tuple[dict[str, Any], list[str]]:
    """Nested values of a file, and their paths."""
    values = overrides(text)
    if values:
        tree: dict[str, Any] = {}
        for path, value in values.items():
            put(tree, path, {"null": None, "true": True, "false": False}.get(value.lower(), value))
        return tree, list(values)
    loaded = read_yaml(text)
    if not isinstance(loaded, Mapping) or not {"trainer", "actor_rollout_ref", "data"} & set(loaded):
        raise FieldError(
            "the file has none of trainer, actor_rollout_ref and data",
            hint="give a veRL configuration as YAML, or a command line with overrides such as trainer.nnodes=2",
        )
    for name in ("trainer", "actor_rollout_ref", "data"):
        if not isinstance(loaded.get(name) or {}, Mapping):
            raise FieldError(
                f"{name}: {str(loaded[name])[:80]!r} is no section", path=name, hint="write its keys below it"
            )
    return dict(loaded), list(leaves(loaded))


def _units(gpus: int, tp: int, pool: str) -> int:
    if gpus % tp:
        raise FieldError(
            f"{pool}: {gpus} GPUs are no multiple of the {tp} of a rollout replica",
            path=f"{_ROLLOUT}.tensor_model_parallel_size",
            hint="correct the sizes",
        )
    return gpus // tp
