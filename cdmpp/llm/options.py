"""Options of language models: type, default, limits and description of each.

The command line and the schemas of the HTTP service are made from them. Functions have the same defaults in their
signatures (:mod:`cdmpp.llm.defaults`). Nothing heavy is imported, because the command line reads this at its start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from cdmpp.errors import FieldError
from cdmpp.llm import defaults
from cdmpp.programs.query_options import ProgramFramework

#: Of each degree of parallelism; sequences of a batch; tokens of a prompt or answer; drafted tokens; ranks of a job.
MAX_DEGREE, MAX_BATCH, MAX_TOKENS, MAX_MTP, MAX_RANKS = 1024, 65_536, 1_048_576, 16, 65_536
#: Of a training step: tokens of a sequence, and sequences.
MAX_SEQUENCE, MAX_GLOBAL_BATCH = 1 << 20, 1 << 24
MAX_REQUESTS = 100_000
#: Requests per second.
MIN_RATE, MAX_RATE = 1e-6, 1e6
REQUIRED: Final = ...


def check_whole(name: str, value: Any, most: int) -> None:
    """Raise :class:`FieldError` unless a value is a whole number from 1 to ``most``."""
    if type(value) is not int or not 1 <= value <= most:
        raise FieldError(
            f"{name}: {str(value)[:80]!r} is not allowed", path=name, hint=f"a whole number from 1 to {most}"
        )


@dataclass(frozen=True)
class RequestOption:
    """An option of a request.

    Attributes
    ----------
    type : type
        int, float, bool or str.
    help : str
        A sentence.
    default : object
        ``REQUIRED`` without one.
    unset : str
        What the default None means, unless that is clear.
    minimum, maximum, below : float or None
        Limits; ``below`` is exclusive.
    choices : tuple of str
        Allowed texts; of element types also their other names, such as "bf16".
    """

    type: type
    help: str
    default: Any = REQUIRED
    unset: str = ""
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def is_dtype(self) -> bool:
        """Whether the value is an element type."""
        return "float16" in self.choices


def _int(
    help: str, default: Any, least: int, most: float | None = None, unset: str = "", below: int | None = None
) -> RequestOption:
    return RequestOption(int, help, default, unset, least, most, below)


def _share(help: str, default: float | None, unset: str = "", *, most: float | None = None) -> RequestOption:
    return RequestOption(float, help, default, unset, 0, most, 1 if most is None else None)


def _text(help: str, default: str | None, choices: tuple[str, ...], unset: str = "") -> RequestOption:
    return RequestOption(str, help, default, unset, choices=choices)


def _degree(help: str, most: int = MAX_DEGREE) -> RequestOption:
    return _int(help, defaults.DEGREE, 1, most)


_REPLICAS = "Replicas of the attention, which divide the batch: tp * pp * dp devices."
LAYOUT: dict[str, RequestOption] = {
    "tp": _degree("Ranks that share each layer (tensor parallelism)."),
    "pp": _degree("Stages that share the layers (pipeline parallelism)."),
    "ep": _degree("Groups that share the experts (expert parallelism); ep <= tp * dp."),
    "dp": _int(_REPLICAS, None, 1, MAX_DEGREE, "max(1, ep // tp)"),
}
_FLOATS = ("bfloat16", "float16", "float32")
_WEIGHTS = "Type of quantised weights (int4: the weights alone, others: the activations too)."
_STATED = "as the configuration says, else dtype"
_ENGINE = "Alone: the current profile of this engine. With the engine kernels-only: whose kernels."
_DRAFTED = "Tokens that a decode step drafts (prediction of several tokens)."
#: Options of a model on devices, whatever it computes.
MODEL = LAYOUT | {
    "dtype": _text("Type of activations.", defaults.DTYPE, _FLOATS),
    "weights": _text(_WEIGHTS, None, ("float8_e4m3", "int8", "float4_e2m1", "int4", *_FLOATS), _STATED),
    "kv_dtype": _text("Type of the cache.", None, ("float8_e4m3", "int8", *_FLOATS), _STATED),
    "framework": _text(_ENGINE, None, get_args(ProgramFramework), f"that of the engine {defaults.ENGINE}"),
    "cuda_graph": RequestOption(bool, "Decode steps may be captured graphs.", defaults.CUDA_GRAPH),
    "input": _int("Tokens of each prompt.", defaults.INPUT, 1, MAX_TOKENS),
    "mtp": _int(_DRAFTED, defaults.MTP, 0, MAX_MTP),
    "acceptance": _share("Share of drafted tokens that is right, where those before are.", defaults.ACCEPTANCE, most=1),
}
OUTPUT = _int("Tokens of each answer.", defaults.OUTPUT, 1, MAX_TOKENS)
#: Options of a batch, beside those of the model.
BATCH = {"batch": _int("Sequences of all replicas.", defaults.BATCH, 1, MAX_BATCH), "output": OUTPUT}
_WARMUP = "Requests at the beginning that percentiles leave out."
_SPREAD = "Share by which lengths vary around input and output."
_UNSPREAD = "0.05 for concurrency of engines that mix prompts and decoding, else 0"
#: Options of simulated serving, beside those of the model.
SERVING = {
    "concurrency": _int("Requests in flight of simulated serving.", None, 1, MAX_BATCH),
    "rate": RequestOption(float, "Requests per second (Poisson) of simulated serving.", None, "", MIN_RATE, MAX_RATE),
    "output": replace(OUTPUT, default=defaults.SERVED_OUTPUT),
    "count": _int("Requests.", None, 1, MAX_REQUESTS, "8 for each in flight, 1,000 for a rate"),
    "warmup": _int(_WARMUP, None, 0, None, "those in flight of concurrency, else 0", MAX_REQUESTS),
    "seed": _int("Of arrivals and lengths.", defaults.SEED, 0, below=2**32),
    "spread": _share(_SPREAD, None, _UNSPREAD),
    "prefix_hit": _share("Share of each prompt that is in the cache already.", defaults.PREFIX_HIT),
}
_RECOMPUTED = "Activations that the backward pass computes again."
#: Options of a training step.
TRAINING = {
    "gpus": _int("Devices of the job.", REQUIRED, 1, MAX_RANKS),
    "global_batch": _int("Sequences of the step.", REQUIRED, 1, MAX_GLOBAL_BATCH),
    "sequence": _int("Tokens of a sequence.", REQUIRED, 1, MAX_SEQUENCE),
    "tp": _degree("Ranks that share each layer.", MAX_RANKS),
    "pp": _degree("Stages that share the layers.", MAX_RANKS),
    "virtual_pp": _degree("Parts of the model on each stage (interleaving).", MAX_RANKS),
    "cp": _degree("Ranks that share each sequence.", MAX_RANKS),
    "ep": _degree("Ranks that share the experts.", MAX_RANKS),
    "sharding": _text("What data-parallel copies divide.", defaults.SHARDING, ("none", "optimizer", "fsdp")),
    "micro_batch": _int("Sequences of one pass of a copy.", defaults.MICRO_BATCH, 1, MAX_GLOBAL_BATCH),
    "dtype": _text("Type of weights and activations.", defaults.DTYPE, _FLOATS),
    "products": _text("Type of the layers' products.", None, ("float8_e4m3", "mxfp8", "nvfp4"), "dtype"),
    "recompute": _text(_RECOMPUTED, defaults.RECOMPUTE, ("none", "selective", "full")),
    "overlap": _text("Communication beside computation.", None, ("none", "gradients", "all"), "as the engine does"),
    "ranks_per_node": _int("Devices of a node.", None, 1, 1024, "the device's"),
}
