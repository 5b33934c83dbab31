"""Parallel layout of a model, and the element types of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig, PartWeights
from cdmpp.llm.options import MAX_DEGREE, LayoutOptions, TypeOptions
from cdmpp.programs.elements import DTYPE_BYTES, canonical_dtype

#: Largest degree of each kind of parallelism.

#: Element types of activations and of the cache.
DTYPES = ("bfloat16", "float16", "float32")
#: Element types of quantised weights -> scaling of linear layers, and of layers of experts.
WEIGHTS: dict[str, tuple[str, str]] = {
    "float8_e4m3": ("channel", "tensor"),
    "int8": ("channel", "channel"),
    "float4_e2m1": ("nvfp4", "nvfp4"),
    "int4": ("block128", "block128"),
}
#: Weight types whose activations keep their own type.
WEIGHT_ONLY = ("int4",)
#: Element types of a cache that is narrower than the activations.
CACHE_DTYPES = ("float8_e4m3", "int8")
#: Figure of a device that says whether it has units for a type.
_UNITS = {"float8_e4m3": "peak_flops_fp8_matrix", "float4_e2m1": "peak_flops_fp4_matrix", "int8": "peak_ops_int8"}
#: Bytes of the scales of one weight, where they are more than one percent.
_SCALE_BYTES = {"int4": 2 / 128, "float4_e2m1": 1 / 16}


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism.

    ``tp`` ranks share each layer, ``pp`` stages share the layers, and ``dp`` replicas of the attention (default, None:
    ``max(1, ep // tp)``) divide the batch: ``tp * pp * dp`` devices in all. The experts of a layer are shared by all
    its ``tp * dp`` ranks, in ``ep`` groups (``ep <= tp * dp``) of ``tp * dp / ep`` ranks, which split each of the
    group's experts. A model without experts has ``dp`` copies.
    """

    tp: int
    pp: int
    ep: int
    dp: int

    def __init__(self, tp: int = 1, pp: int = 1, ep: int = 1, dp: int | None = None) -> None:
        if dp is None:
            dp = max(1, ep // tp) if type(tp) is type(ep) is int and tp > 0 else 1
        for name, value in (("tp", tp), ("pp", pp), ("ep", ep), ("dp", dp)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, options: LayoutOptions) -> Layout:
        """The degrees of a request."""
        return cls(options["tp"], options["pp"], options["ep"], options["dp"])

    @property
    def expert_tp(self) -> int:
        """Ranks that share one expert."""
        return max(1, self.stage_ranks // self.ep)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp

    @property
    def gpus(self) -> int:
        """Ranks in total."""
        return self.stage_ranks * self.pp

    def check(self, config: LLMConfig) -> None:
        """Raise :class:`FieldError` where the model cannot be split so."""
        for name in ("tp", "pp", "ep", "dp"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_DEGREE:
                raise FieldError.not_allowed(name, value, hint=f"a whole number from 1 to {MAX_DEGREE}")
        allowed = allowed_tp(config)
        if self.tp not in allowed:
            raise FieldError.at(
                "tp",
                f"{self.tp} does not divide the model: {_divided(config)}",
                hint="allowed: " + ", ".join(map(str, allowed)),
            )
        if self.pp > config.layers:
            raise FieldError.at(
                "pp", f"{self.pp} stages for {config.layers} layers", hint=f"allowed: 1 to {config.layers}"
            )
        self._check_experts(config)

    def _check_experts(self, config: LLMConfig) -> None:
        experts = config.experts
        if experts is None:
            if self.ep != 1:
                raise FieldError.at("ep", f"{self.ep}, but {config.model_type} has no experts", hint="use ep=1")
            return
        if not expert_fits(config, self.tp, self.ep, self.dp):
            given = self.dp != Layout(self.tp, 1, self.ep).dp
            where = f"tp={self.tp}" + (f", dp={self.dp}" if given else "")
            allowed = allowed_ep(config, self.tp, self.dp if given else None)
            raise FieldError.at(
                "ep",
                f"{self.ep} does not fit {where}, {experts.count} experts of {experts.intermediate} columns",
                hint=(f"allowed with {where}: " + ", ".join(map(str, allowed)))
                if allowed
                else "other degrees of tp and dp",
            )


def _divided(config: LLMConfig) -> str:
    sizes = f"{config.heads} heads"
    if config.latent is None:
        sizes += f", {config.kv_heads} key-value heads"
    return sizes + (f", {config.intermediate} columns of the feed-forward layer" if config.dense_layers else "")


def allowed_tp(config: LLMConfig) -> list[int]:
    """Degrees of tensor parallelism that divide heads, key-value heads (or replicate them) and columns."""
    kv_heads = config.heads if config.latent is not None else config.kv_heads
    return [
        tp
        for tp in range(1, min(config.heads, MAX_DEGREE) + 1)
        if config.heads % tp == 0
        and (kv_heads % tp == 0 or tp % kv_heads == 0)
        and (not config.dense_layers or config.intermediate % tp == 0)
        and (config.experts is None or any(expert_fits(config, tp, ep) for ep in range(1, tp + 1)))
    ]


def allowed_ep(config: LLMConfig, tp: int, dp: int | None = None) -> list[int]:
    """Degrees of expert parallelism that fit ``tp`` ranks and ``dp`` replicas (None: as many as follow from it)."""
    assert config.experts is not None
    most_ranks = min(config.experts.count, MAX_DEGREE if dp is None else tp * dp)
    return [ep for ep in range(1, most_ranks + 1) if expert_fits(config, tp, ep, dp)]


def expert_fits(config: LLMConfig, tp: int, ep: int, dp: int | None = None) -> bool:
    """Whether degrees of parallelism divide the experts."""
    experts, ranks = config.experts, Layout(tp, 1, ep, dp).stage_ranks
    assert experts is not None
    return experts.count % ep == 0 and ranks % ep == 0 and experts.intermediate % (ranks // ep) == 0


def _widened(weights: str | None, packed: bool, device: DeviceSpec | None) -> bool:
    """Whether products widen weights of a type: weights only, or a device without units for it."""
    units = None if weights is None else _UNITS.get(weights)
    lacking = device is not None and units is not None and getattr(device, units) is None
    return packed or weights in WEIGHT_ONLY or lacking


@dataclass(frozen=True)
class Types:
    """Element types of a model's tensors."""

    dtype: str = "bfloat16"  # of activations, cache and weights that are not quantised
    # Type of quantised weights. ``int4`` is weight-only; the others are types of the products, whose activations are
    # quantised at run time.
    weights: str | None = None
    scaling: str | None = None  # of the weights of the checkpoint; default: that of :data:`WEIGHTS`
    kv_dtype: str | None = None  # type of the cache, where it is narrower than ``dtype``
    # Whether products widen quantised weights, as engines do for ``int4`` and where the device has no units.
    weight_only: bool = False
    parts: tuple[PartWeights, ...] = ()  # parts of a layer whose weights have another type

    def stated(self) -> dict[str, Any]:
        """``dtype``, ``weights`` and ``kv_dtype`` of a request for these types, whatever the configuration says."""
        return self.of_answer() | {"weights": self.weights or self.dtype}

    def of_answer(self) -> dict[str, Any]:
        """The same as an answer reports them: ``weights`` is None unless they are quantised."""
        return {"dtype": self.dtype, "weights": self.weights, "kv_dtype": self.kv_dtype or self.dtype}

    @classmethod
    def of_options(
        cls, config: LLMConfig, options: TypeOptions, device: DeviceSpec | None, usual_kv_dtype: str | None = None
    ) -> Types:
        """:meth:`of` the options of a request."""
        stated = options["dtype"], options["weights"], options["kv_dtype"]
        return cls.of(config, *stated, device, usual_kv_dtype)

    @classmethod
    def of(
        cls,
        config: LLMConfig,
        dtype: Any = "bfloat16",
        weights: Any = None,
        kv_dtype: Any = None,
        device: DeviceSpec | None = None,
        usual_kv_dtype: str | None = None,
    ) -> Types:
        """Types of a request; weights and cache that are not stated are those of the configuration.

        ``usual_kv_dtype``: type of the cache where weights are quantised, and neither request nor configuration states
        its type.
        """
        dtype, weights, kv_dtype = canonical_dtype(dtype), canonical_dtype(weights), canonical_dtype(kv_dtype)
        kv_dtype = canonical_dtype(kv_dtype.lower()) if isinstance(kv_dtype, str) else kv_dtype
        kv_dtype = None if kv_dtype == "auto" else kv_dtype
        types = cls._of_weights(config, dtype, weights)
        known = (*CACHE_DTYPES, types.dtype)
        if kv_dtype is not None and (kv_dtype not in known or (types.dtype == "float32" and kv_dtype != "float32")):
            raise FieldError.not_allowed(
                "kv_dtype", kv_dtype, hint="one of: " + ", ".join(known if types.dtype != "float32" else ("float32",))
            )
        as_stated = types.weights is not None and types.weights == config.weights
        weight_only = _widened(types.weights, config.packed and as_stated, device)
        parts = config.part_weights if as_stated else ()
        parts = tuple(replace(part, packed=_widened(part.weights, part.packed, device)) for part in parts)
        if kv_dtype is None and types.dtype != "float32":
            quantised = types.weights is not None and not weight_only
            kv_dtype = config.kv_dtype or (usual_kv_dtype if quantised else None)
        return replace(
            types, kv_dtype=None if kv_dtype == types.dtype else kv_dtype, weight_only=weight_only, parts=parts
        )

    @classmethod
    def _of_weights(cls, config: LLMConfig, dtype: Any, weights: Any) -> Types:
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise FieldError.not_allowed("dtype", dtype, hint="one of: " + ", ".join(DTYPES))
        known = (*WEIGHTS, *DTYPES)
        if weights is not None and (not isinstance(weights, str) or weights not in known):
            raise FieldError.not_allowed("weights", weights, hint="one of: " + ", ".join(known))
        if weights is None:
            return cls._quantised(dtype, config.weights, config.weight_scaling)
        if weights in DTYPES and weights != dtype:
            raise FieldError.at(
                "weights", f"{weights} with dtype {dtype}", hint=f"{dtype}, or a type of quantised weights"
            )
        scaling = config.weight_scaling if weights == config.weights else None
        return cls(dtype) if weights == dtype else cls._quantised(dtype, weights, scaling)

    @classmethod
    def _quantised(cls, dtype: str, weights: str | None, scaling: str | None) -> Types:
        if weights is not None and dtype == "float32":
            raise FieldError.at(
                "weights", f"no {weights} weights with dtype float32", hint="use dtype bfloat16 or float16"
            )
        return cls(dtype, weights, scaling)

    def product(self, part: str = "attention") -> dict[str, str]:
        """Fields ``dtype``, ``weight_dtype`` and ``scaling`` of a product with the weights of one part of a layer."""
        stated = self._stated(part)
        if stated.weights is None:
            return {"dtype": self.dtype}
        usual = WEIGHTS[stated.weights][part == "experts"]
        scaling = stated.scaling or usual
        if stated.scaling == "channel" and part == "experts":
            scaling = usual
        if stated.packed:
            return {"dtype": self.dtype, "weight_dtype": stated.weights, "scaling": scaling}
        if part == "experts" and (stated.weights, scaling) == ("float4_e2m1", "mx32"):
            # As engines run them on Blackwell: the activations have eight bits.
            return {"dtype": "float8_e4m3", "weight_dtype": stated.weights, "scaling": scaling}
        return {"dtype": stated.weights, "scaling": scaling}

    def _stated(self, part: str) -> PartWeights:
        default = PartWeights(part, self.weights, self.scaling, self.weight_only)
        return next((stated for stated in self.parts if stated.part == part), default)

    @property
    def bytes(self) -> float:
        """Bytes of an activation."""
        return DTYPE_BYTES[self.dtype]

    @property
    def cache_bytes(self) -> float:
        """Bytes of a cached element."""
        return DTYPE_BYTES[self.kv_dtype or self.dtype]

    def weight_bytes(self, part: str | None) -> float:
        """Bytes of a weight of one part of a layer, with its scales; None: of a weight that is never quantised."""
        stated = PartWeights("") if part is None else self._stated(part)
        if stated.weights is None:
            return self.bytes
        scale = 1 / 32 if stated.scaling == "mx32" else _SCALE_BYTES.get(stated.weights, 0.0)
        return DTYPE_BYTES[stated.weights] + scale

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of an activation that is sent to an expert on another rank."""
        experts = self._stated("experts")
        return self.bytes if experts.weights is None or experts.packed else max(1.0, DTYPE_BYTES[experts.weights])
