"""Jobs of RL frameworks, veRL and OpenRLHF: pools of an RL plan in GPUs and nodes, and requests from such pools.

veRL's files are YAML, or overrides of its command line. The keys are those of veRL 0.9 (``verl/trainer/config``,
trainer ``v1``). A shared plan is the trainer mode ``sync``, in which rollout and trainer have the same GPUs. Separate
pools are the mode ``separate_async`` without hybrid engine.

OpenRLHF's files are arguments of ``openrlhf.cli.train_ppo_ray``. OpenRLHF 0.10 and later have names in groups
(``--actor.num_gpus_per_node``), earlier ones plain names (``--actor_num_gpus_per_node``). The importer reads both.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.layers import nodes, tensor_parallel
from cdmpp.plan.formats.registry import Exported, Imported, PlanExporter, RequestImporter, at, leaves, put
from cdmpp.plan.formats.shell import known
from cdmpp.plan.formats.text import CommandOptions, assumptions, line, options, overrides, read_yaml, write_yaml
from cdmpp.plan.rl.schema import RlPlan, RlRequest
from cdmpp.predict.requests.fields import MAX_COUNT
from cdmpp.predict.requests.request import Answer, Count, DeviceForm, Request

#: Fields that no configuration of an RL framework has.
MISSING = ("lengths.quantiles", "decode", "training")
#: Names of the arguments before groups of names, by the later name, where they are not those of :func:`earlier`.
_EARLIER = {
    "train.colocate_all": "colocate_all_models",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.async_enable": "async_train",
    "train.async_queue_size": "async_queue_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.max_new_tokens": "max_new_tokens",
    "data.max_len": "max_len",
    "train.micro_batch_size": "micro_train_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "ds.zero_stage": "zero_stage",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.packing_samples": "packing_samples",
    "ds.adam_offload": "adam_offload",
}
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
_MODE = "trainer.v1.trainer_mode"
_VERSIONS = "trainer.v1.sampler.max_off_policy_threshold"


@dataclass(frozen=True)
class NodePool:
    """Equal units: generation instances or data-parallel training units."""

    name: str
    # Units; GPUs of each.
    units: int
    unit_gpus: int
    # Nodes; GPUs of each.
    nodes: int
    node_gpus: int


@dataclass(frozen=True)
class Pools:
    """Pools of a plan."""

    # The same pool where the plan is shared.
    generation: NodePool
    training: NodePool
    shared: bool  # the units generate, then train
    tp: int  # GPUs of a generation instance
    notes: tuple[str, ...]
    layout: Mapping[str, Any] | None  # degrees and micro-batch of training; None: the plan has none
    # Samples of a step and of an update.
    samples: int
    mini_batch: int

    def check(self, framework: str, per_gpu: bool = False) -> None:
        """Raise :class:`FieldError` where the framework refuses to divide its samples or devices so.

        ``per_gpu``: whether it divides them by all GPUs that train where the plan has no layout.
        """
        gpus = self.training.nodes * self.training.node_gpus
        layout = self.layout or {}
        ranks = layout.get("tp", 1) * layout.get("pp", 1) * layout.get("cp", 1)
        copies = gpus // ranks if layout or per_gpu else 1
        for what, value, divisor in (
            ("GPUs of the trainer", gpus, ranks),
            ("samples of a step", self.samples, copies * layout.get("micro_batch", 1)),
            ("samples of an update", self.mini_batch, copies * layout.get("micro_batch", 1)),
            ("samples of a step", self.samples, self.mini_batch),
            ("GPUs that generate", self.generation.nodes * self.generation.node_gpus, self.tp),
        ):
            if value % divisor:
                raise FieldError(
                    f"{framework} refuses {value} {what}: they are no multiple of {divisor}",
                    path="samples_per_step",
                    hint="plan with --config, which has whole nodes and such layouts only, or change the samples",
                )


class RlExporter(PlanExporter, ABC):
    """Base of the formats of RL frameworks."""

    kinds = ("rl",)

    tp: Count | None = Field(None, description="GPUs of a unit; default: ranks of the decode programs, or 1.")
    node_gpus: Count = Field(8, description="GPUs of a node.")
    samples_per_prompt: Count = Field(1, description="Responses to one prompt.")

    def pools(self, request: Request[Any], plan: Answer) -> tuple[RlRequest, RlPlan, Pools]:
        """The pools of a plan. Raises FieldError: several pools generate, or nothing trains."""
        assert isinstance(request, RlRequest) and isinstance(plan, RlPlan)
        if plan.generation.parts:
            raise FieldError(
                f"generation: {len(plan.generation.parts)} pools generate at once ({plan.generation.pool}); the format "
                "has one rollout pool",
                path="mix_pools",
                hint="plan without mix_pools, or use the format ray",
            )
        if plan.training is None:
            raise FieldError.at(
                "training",
                "the plan only generates, and the format has a trainer",
                hint="give the training cost, or use the format ray",
            )
        tp, notes = tensor_parallel(self.tp, request, "decode", "pools")
        generation = self._pool(plan.generation.pool, plan.generation.instances, tp)
        shared = plan.training.shared
        training = generation if shared else self._pool(plan.training.pool, plan.training.units, tp)
        notes += [note for pool in {generation, training} if (note := self._spread(pool))]
        cost = next(pool.training or request.training for pool in request.pools if pool.name == plan.training.pool)
        mini_batch = (cost.mini_batch if cost is not None else None) or request.samples_per_step
        everything = (*sorted(notes), *_unsaid(request, plan))
        layout, samples = plan.training.layout, request.samples_per_step
        return request, plan, Pools(generation, training, shared, tp, everything, layout, samples, mini_batch)

    def prompts(self, samples: int, whole: str = "a step") -> int:
        """Prompts of a step, or of another ``whole``.

        Raises FieldError: the responses to a prompt do not divide the samples.
        """
        if samples % self.samples_per_prompt:
            raise FieldError.at(
                "samples_per_prompt",
                f"{self.samples_per_prompt} does not divide the {samples} samples of {whole}",
                hint="choose a divisor",
            )
        return samples // self.samples_per_prompt

    def _pool(self, name: str, units: int, tp: int) -> NodePool:
        return NodePool(name, units, tp, *nodes(units, tp, self.node_gpus))

    def _spread(self, pool: NodePool) -> str:
        """A note where equal nodes cannot be filled."""
        if pool.nodes <= -(-pool.units * pool.unit_gpus // self.node_gpus):
            return ""
        return (
            f"{pool.units} units of {pool.unit_gpus} GPUs in pool {pool.name!r} take {pool.nodes} nodes of "
            f"{pool.node_gpus} GPUs: all nodes have equally many"
        )


class RlImporter(RequestImporter, ABC):
    """Base of the configurations of RL frameworks."""

    kinds = ("rl",)

    model: str | None = Field(
        None, description="config.json of Hugging Face: the decode curve is predicted; default: the file's model."
    )
    device: DeviceForm | None = Field(None, description="Device of the pools, for the decode curve.")

    def imported(
        self, request: dict[str, Any], tp: int, model: Any, ignored: tuple[str, ...], notes: Sequence[str]
    ) -> Imported:
        """The request with the decode curve of a language model, where model and device are known.

        ``request``: of :func:`rl_request`. ``tp``: GPUs of a generation instance. ``model``: model of the file, used
        where it is a local folder with a ``config.json``.
        """
        path = Path(self.model) if self.model is not None else Path(str(model)) / "config.json"
        if self.device is None or (self.model is None and not (model and path.is_file())):
            more = ["options model and device give the decode curve of a language model"]
            return Imported(request, ignored, (*notes, *more), MISSING)
        context = request.get("prompt_tokens", 0) + request.get("lengths", {}).get("max_tokens", 0) // 2
        curve = {"config": str(path), "past_len": context, "tp": tp}
        pools = [pool | {"device": self.device} for pool in request["pools"]]
        more = [f"decoding is priced with {context} cached tokens of each sample: the prompt and half a response"]
        return Imported(request | {"pools": pools, "decode": {"llm": curve}}, ignored, (*notes, *more), MISSING)


def _unsaid(request: RlRequest, plan: RlPlan) -> list[str]:
    """Parts of a plan that no RL framework's configuration has."""
    notes = []
    if plan.tail_split.used:
        tail, regular = plan.tail_split.tail, plan.tail_split.regular
        notes.append(
            f"the tail split is not in the file: {tail.samples} samples on {tail.instances} instances, "
            f"{regular.samples} on {regular.instances}"
        )
    if plan.streaming is not None and plan.streaming.batches > 1:
        notes.append(f"streaming is not in the file: training starts on each of {plan.streaming.batches} batches")
    if plan.migration is not None and plan.migration.applied:
        notes.append(f"migration is not in the file: at {plan.migration.threshold} unfinished samples")
    devices = {pool.name: pool.device for pool in request.pools if pool.device is not None}
    if len({str(device) for device in devices.values()}) > 1:
        listed = ", ".join(f"{name}: {device}" for name, device in devices.items())
        notes.append(f"the file does not say which nodes a pool has ({listed})")
    return notes


def rl_request(
    *,
    generation: int,
    training: int | None,
    samples: int,
    prompt_tokens: int | None,
    max_tokens: int | None,
    max_batch: int | None = None,
    staleness: int | None = None,
) -> dict[str, Any]:
    """A request with the sizes of a job; lengths, costs and weights are missing.

    ``generation``: generation instances. ``training``: training units of another pool; None: the generation instances
    train too. ``samples``: of a step. ``max_tokens``: of a response. ``max_batch``: most samples of an
    instance at once. ``staleness``: steps by which weights may be behind.
    """
    pools: list[dict[str, Any]] = [{"name": "shared", "units": generation}]
    if training is not None:
        pools = [
            {"name": "rollout", "units": generation, "stages": ["generation"]},
            {"name": "trainer", "units": training, "stages": ["training"]},
        ]
    request: dict[str, Any] = {
        "samples_per_step": samples,
        "pools": pools,
        "layout": "shared" if training is None else "separate",
        "generation_units": generation,
        "training_units": generation if training is None else training,
    }
    optional = {
        "prompt_tokens": prompt_tokens,
        "lengths": None if max_tokens is None else {"max_tokens": max_tokens},
        "kv": None if max_batch is None else {"max_batch": max_batch},
        "staleness": staleness,
    }
    return request | {name: value for name, value in optional.items() if value is not None}


def earlier(name: str) -> str:
    """Name of an argument in OpenRLHF 0.9."""
    return _EARLIER.get(name, name.replace(".", "_"))


class OpenRlhfExporter(RlExporter):
    """Writes arguments, one on each line."""

    version: Literal["0.11", "0.9"] = Field(
        "0.11", description="Names of the arguments: in groups (0.11), or plain (0.9)."
    )

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """Nodes and GPUs of the actor, engines of vLLM, colocation, asynchronous training."""
        rl, rl_plan, pools = self.pools(request, plan)
        pools.check("OpenRLHF")
        training = pools.training
        values: list[tuple[str, Any]] = [
            ("actor.num_nodes", training.nodes),
            ("actor.num_gpus_per_node", training.node_gpus),
            ("ref.num_nodes", training.nodes),
            ("ref.num_gpus_per_node", training.node_gpus),
            ("vllm.num_engines", pools.generation.units),
            ("vllm.tensor_parallel_size", pools.tp),
            ("train.colocate_all", pools.shared),
            ("vllm.enable_sleep", pools.shared),
            ("train.colocate_actor_ref", not pools.shared),
            ("rollout.batch_size", self.prompts(rl.samples_per_step)),
            ("rollout.n_samples_per_prompt", self.samples_per_prompt),
        ]
        tokens = rl_plan.lengths.limit
        values += [("rollout.max_new_tokens", tokens), ("data.max_len", tokens + rl.prompt_tokens)]
        notes = list(pools.notes)
        if pools.layout is not None:
            values += self._training(pools, pools.layout)
        if rl_plan.mode == "async" and not pools.shared:
            stale = None if rl_plan.streaming is None else rl_plan.streaming.staleness
            values += [("train.async_enable", True), ("train.async_queue_size", stale or 1)]
            if stale is None:
                notes.append("async without a limit of staleness: the queue has one batch")
        if rl.kv.max_batch != type(rl.kv)().max_batch:
            notes.append(f"max_batch {rl.kv.max_batch} of an engine is not in the file: OpenRLHF leaves it to vLLM")
        named = values if self.version == "0.11" else [(earlier(name), value) for name, value in values]
        return Exported(line(named), tuple(notes))

    def _training(self, pools: Pools, layout: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Arguments of the training step."""
        if layout["pp"] > 1 or layout["ep"] > 1:
            raise FieldError(
                f"the plan trains with pp={layout['pp']} and ep={layout['ep']}; OpenRLHF has neither",
                path="training.sizes",
                hint="plan with --degrees pp=1,ep=1",
            )
        return [
            ("train.batch_size", pools.mini_batch),
            ("train.micro_batch_size", layout["micro_batch"]),
            ("rollout.micro_batch_size", layout["micro_batch"]),
            ("ds.zero_stage", 3 if layout["sharding"] == "fsdp" else 2),
            ("ds.tensor_parallel_size", layout["tp"]),
            ("ds.ring_attn_size", layout["cp"]),
            ("ds.packing_samples", True),
            ("ds.adam_offload", pools.shared),
            ("actor.gradient_checkpointing_enable", layout["recompute"] == "full"),
        ]


class OpenRlhfImporter(RlImporter):
    """Reads the text of a shell line, a script or a file of arguments."""

    def read(self, text: str, kind: str) -> Imported:
        """Pools, samples, and lengths of prompt and response."""
        args = CommandOptions(options(text))
        if not any(name.startswith(("actor", "vllm")) for name in args.remaining):
            raise FieldError(
                "the text has no argument of actor or vllm",
                hint="give the arguments of openrlhf.cli.train_ppo_ray, such as --vllm.num_engines 4",
            )

        def whole(name: str, default: int | None = None) -> int | None:
            return args.whole(name, default, earlier(name))

        def flag(name: str) -> bool:
            return any([args.flag(name), args.flag(earlier(name))])

        tp = whole("vllm.tensor_parallel_size", 1) or 1
        actor = (whole("actor.num_nodes", 1) or 1) * (whole("actor.num_gpus_per_node", 8) or 8)
        engines = whole("vllm.num_engines")
        if engines is None:
            raise FieldError.at("--vllm.num_engines", "missing", hint="an rl request generates with an engine")
        asynchronous = flag("train.async_enable")
        queue = whole("train.async_queue_size", 1)
        shared = flag("train.colocate_all") and not asynchronous
        if actor % tp or (shared and actor != engines * tp):
            raise FieldError.at(
                "--actor.num_gpus_per_node",
                f"{actor} GPUs of the actor do not fit {engines} engines of {tp} GPUs",
                hint="correct the sizes",
            )
        new_tokens = whole("rollout.max_new_tokens", args.whole("generate_max_len"))
        length = whole("data.max_len")
        prompt = args.whole("prompt_max_len")
        if prompt is None and new_tokens is not None and length is not None:
            prompt = max(length - new_tokens, 0)
        request = rl_request(
            generation=engines,
            training=None if shared else actor // tp,
            samples=(whole("rollout.batch_size", 1024) or 1) * (whole("rollout.n_samples_per_prompt", 1) or 1),
            prompt_tokens=prompt,
            max_tokens=new_tokens,
            staleness=queue if asynchronous else None,
        )
        for name in ("vllm.enable_sleep", "train.colocate_actor_ref", "ref.num_nodes", "ref.num_gpus_per_node"):
            flag(name)
        notes = (f"a unit has {tp} GPUs, those of an engine", *assumptions("arguments", "OpenRLHF", args.assumed))
        paths = [args.remaining.pop(name, None) for name in ("actor.model_name_or_path", "pretrain")]
        model = next(filter(None, paths), None)
        return self.imported(request, tp, model, args.ignored(), notes)


class VerlExporter(RlExporter):
    """Writes YAML: a part of a configuration, for Hydra's ``--config-name`` with ``ppo_trainer`` as default."""

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """Nodes and GPUs of rollout and trainer, sizes of a step, staleness."""
        rl, rl_plan, pools = self.pools(request, plan)
        pools.check("veRL", per_gpu=True)
        generation, training, prompts = pools.generation, pools.training, self.prompts(rl.samples_per_step)
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
                f"{_ACTOR}.ppo_mini_batch_size": self.prompts(pools.mini_batch, "an update"),
                f"{_ROLLOUT}.checkpoint_engine.backend": "nccl",
                _VERSIONS: None if stale is None else stale + 1,
                "trainer.v1.sampler.max_off_policy_strategy": "wait",
            }
            if stale == 0:
                notes.append("veRL trains separate pools asynchronously: one version of the weights in a trajectory")
        if pools.layout is not None:
            values |= self._training(pools, pools.layout)
            if pools.layout["sharding"] == "fsdp" and f"{_ACTOR}.megatron.tensor_model_parallel_size" in values:
                notes.append("weights and gradients are not divided among copies: veRL's Megatron has no such sharding")
        tree: dict[str, Any] = {}
        for path, value in values.items():
            put(tree, path, value)
        return Exported(write_yaml(tree), tuple(notes))

    def _training(self, pools: Pools, layout: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of the training step: FSDP where it divides weights among copies alone, else Megatron."""
        values: dict[str, Any] = {
            f"{_ACTOR}.ppo_mini_batch_size": self.prompts(pools.mini_batch, "an update"),
            f"{_ACTOR}.ppo_micro_batch_size_per_gpu": layout["micro_batch"],
            f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": layout["micro_batch"],
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": layout["micro_batch"],
        }
        recompute = layout["recompute"]
        if layout["sharding"] == "fsdp" and layout["tp"] == layout["pp"] == layout["ep"] == 1:
            return values | {
                f"{_ACTOR}.strategy": "fsdp2",
                f"{_ACTOR}.ulysses_sequence_parallel_size": layout["cp"],
                f"{_ACTOR}.fsdp_config.param_offload": pools.shared,
                f"{_ACTOR}.fsdp_config.optimizer_offload": pools.shared,
                "actor_rollout_ref.model.enable_gradient_checkpointing": recompute == "full",
            }
        megatron, virtual = f"{_ACTOR}.megatron", layout["virtual_pp"]
        whole = {"method": "uniform", "num_layers": 1} if recompute == "full" else {}
        values |= {
            f"{_ACTOR}.strategy": "megatron",
            f"{megatron}.tensor_model_parallel_size": layout["tp"],
            f"{megatron}.pipeline_model_parallel_size": layout["pp"],
            f"{megatron}.virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
            f"{megatron}.context_parallel_size": layout["cp"],
            f"{megatron}.expert_model_parallel_size": layout["ep"],
            **{f"{megatron}.{part}_offload": pools.shared for part in ("param", "grad", "optimizer")},
            f"{megatron}.override_transformer_config.recompute_granularity": None if recompute == "none" else recompute,
        }
        more = {f"{megatron}.override_transformer_config.recompute_{name}": value for name, value in whole.items()}
        return values | more


class VerlImporter(RlImporter):
    """Reads YAML, or a shell line with overrides such as ``data.train_batch_size=256``."""

    def read(self, text: str, kind: str) -> Imported:
        """Pools, samples, and lengths of prompt and response."""
        tree, given = _tree(text)
        used: set[str] = set()
        assumed: dict[str, int] = {}

        def whole(path: str, default: int | None = None, least: int = 1) -> int | None:
            used.add(path)
            value = _resolved(tree, at(tree, path))
            if value is None:
                if default is not None:
                    assumed[path] = default
                return default
            known(value, path)
            try:
                number = int(str(value))
            except ValueError:
                number = -1
            if not least <= number <= MAX_COUNT:
                raise FieldError.at(
                    path,
                    f"{str(value)[:80]!r} is not a whole number from {least} to {MAX_COUNT}",
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
        mode = known(at(tree, _MODE, "sync"), _MODE)
        separate = mode == "separate_async"
        if separate and not rollout:
            raise FieldError.at(f"{_ROLLOUT}.nnodes", f"0, and the mode is {mode}", hint="give the rollout's nodes")
        hybrid = "actor_rollout_ref.hybrid_engine"
        if separate and known(at(tree, hybrid, True), hybrid) is not False:
            raise FieldError.at(
                "actor_rollout_ref.hybrid_engine",
                "true with separate_async lets the trainer's GPUs generate too",
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
        notes = [f"a unit has {tp} GPUs, those of a rollout replica", *assumptions("keys", "veRL", assumed)]
        if mode == "colocate_async":
            notes.append("colocate_async is read as sync: an rl request has no generation beside training on one GPU")
        used.add("actor_rollout_ref.model.path")
        ignored = tuple(path for path in given if path not in used)
        return self.imported(request, tp, at(tree, "actor_rollout_ref.model.path"), ignored, notes)


def _tree(text: str) -> tuple[dict[str, Any], list[str]]:
    """Nested values of a file, and their paths."""
    values = {} if re.search(r"^(trainer|actor_rollout_ref|data)\s*:", text, re.MULTILINE) else overrides(text)
    if values:
        tree: dict[str, Any] = {}
        for path, value in values.items():
            put(tree, path, {"null": None, "true": True, "false": False}.get(str(value).lower(), value))
        return tree, list(values)
    loaded = read_yaml(text)
    if not isinstance(loaded, Mapping) or not {"trainer", "actor_rollout_ref", "data"} & set(loaded):
        raise FieldError(
            "the file has none of trainer, actor_rollout_ref and data",
            hint="give a veRL configuration as YAML, or a command line with overrides such as trainer.nnodes=2",
        )
    for name in ("trainer", "actor_rollout_ref", "data"):
        if not isinstance(loaded.get(name) or {}, Mapping):
            raise FieldError.at(name, f"{str(loaded[name])[:80]!r} is no section", hint="write its keys below it")
    return dict(loaded), list(leaves(loaded))


def _resolved(tree: Mapping[str, Any], value: Any) -> Any:
    """A value; of ``${a.b}`` and ``${oc.select:a.b,default}`` the one that they name."""
    for _ in range(10):
        text = value if type(value) is str else ""
        named = re.fullmatch(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*(.*?))?\s*\}", text)
        if named is None:
            break
        value = at(tree, named[1], named[2])
    return value


def _units(gpus: int, tp: int, pool: str) -> int:
    if gpus % tp:
        raise FieldError(
            f"{pool}: {gpus} GPUs are no multiple of the {tp} of a rollout replica",
            path=f"{_ROLLOUT}.tensor_model_parallel_size",
            hint="correct the sizes",
        )
    return gpus // tp
