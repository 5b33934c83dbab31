"""Pools of an OpenRLHF job: arguments of ``openrlhf.cli.train_ppo_ray``.

OpenRLHF 0.10 and later have names in groups (``--actor.num_gpus_per_node``), earlier ones plain names
(``--actor_num_gpus_per_node``). The importer reads both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.formats import Exported, Imported
from cdmpp.plan.formats.rl_pools import RlExporter, RlImporter, rl_request
from cdmpp.plan.formats.shell import Arguments, line, options
from cdmpp.predict.requests.request import Answer, Request

#: Names of the arguments before groups of names, by the later name.
_EARLIER = {
    "train.colocate_all": "colocate_all_models",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.async_enable": "async_train",
    "train.async_queue_size": "async_queue_size",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.max_new_tokens": "max_new_tokens",
    "data.max_len": "max_len",
}


def earlier(name: str) -> str:
    """Name of an argument in OpenRLHF 0.9."""
    return _EARLIER.get(name, name.replace(".", "_"))


class OpenRlhfExporter(RlExporter):
    """Writes arguments, one on each line."""

    version: Annotated[
        Literal["0.11", "0.9"], Field(description="Names of the arguments: in groups (0.11), or plain (0.9).")
    ] = "0.11"

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """Nodes and GPUs of the actor, engines of vLLM, colocation, asynchronous training."""
        rl, rl_plan, pools = self.pools(request, plan)
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
            ("rollout.batch_size", self.prompts(rl)),
            ("rollout.n_samples_per_prompt", self.samples_per_prompt),
        ]
        tokens = rl_plan.lengths.limit
        values += [("rollout.max_new_tokens", tokens), ("data.max_len", tokens + rl.prompt_tokens)]
        notes = list(pools.notes)
        if rl_plan.mode == "async" and not pools.shared:
            stale = None if rl_plan.streaming is None else rl_plan.streaming.staleness
            values += [("train.async_enable", True), ("train.async_queue_size", stale or 1)]
            if stale is None:
                notes.append("async without a limit of staleness: the queue has one batch")
        if rl.kv.max_batch != type(rl.kv)().max_batch:
            notes.append(f"max_batch {rl.kv.max_batch} of an engine is not in the file: OpenRLHF leaves it to vLLM")
        named = values if self.version == "0.11" else [(earlier(name), value) for name, value in values]
        return Exported(line(named), tuple(notes))


class OpenRlhfImporter(RlImporter):
    """Reads the text of a shell line, a script or a file of arguments."""

    def read(self, text: str, kind: str) -> Imported:
        """Pools, samples, and lengths of prompt and response."""
        args = Arguments(options(text))
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
            raise FieldError(
                "--vllm.num_engines: missing", path="--vllm.num_engines", hint="an rl request generates with an engine"
            )
        asynchronous = flag("train.async_enable")
        queue = whole("train.async_queue_size", 1)
        shared = flag("train.colocate_all") and not asynchronous
        if actor % tp or (shared and actor != engines * tp):
            raise FieldError(
                f"--actor.num_gpus_per_node: {actor} GPUs of the actor do not fit {engines} engines of {tp} GPUs",
                path="--actor.num_gpus_per_node",
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
        notes = (f"a unit has {tp} GPUs, those of an engine", "missing arguments have OpenRLHF's defaults")
        model = args.text("actor.model_name_or_path", None, "pretrain")
        return self.imported(request, tp, model, args.ignored(), notes)
