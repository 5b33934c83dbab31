"""Layout of a training step: degrees of parallelism, batch, and what is recomputed and hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from cdmpp.devices.registry import known
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.layout import Layout, Types, allowed_tp
from cdmpp.llm.options import MAX_GLOBAL_BATCH, MAX_RANKS, MAX_SEQUENCE, Overlap, Recompute, Sharding, check_whole

#: Types of the products -> element type of their operands, and scaling. Products of MXFP8 are predicted as those with
#: one scale for each tensor: the units have one rate for both, and only the latter were measured.
PRODUCTS: dict[str, tuple[str, str]] = {
    "float8_e4m3": ("float8_e4m3", "tensor"),
    "mxfp8": ("float8_e4m3", "tensor"),
    "nvfp4": ("float4_e2m1", "nvfp4"),
}
BLOCK_SCALED = ("mxfp8", "nvfp4")
#: Figure of a device that says whether it has units for a type. Scales of blocks came with the units for four bits.
_UNITS = {"float8_e4m3": "peak_flops_fp8_matrix", "mxfp8": "peak_flops_fp4_matrix", "nvfp4": "peak_flops_fp4_matrix"}


@dataclass(frozen=True)
class TrainingLayout:
    """Degrees of parallelism and batch of a training step."""

    gpus: int  # ranks in total
    micro_batch: int  # sequences of one pass on one copy
    global_batch: int  # sequences of the step
    sequence: int  # tokens of a sequence
    tp: int = 1  # ranks that share a layer
    pp: int = 1  # stages
    virtual_pp: int = 1  # parts of the model on each stage
    cp: int = 1  # ranks that share a sequence
    ep: int = 1  # Ranks that share the experts of a layer. An expert is on one rank: experts are not divided by ``tp``.
    # What the data-parallel ranks divide: nothing, the state of the optimizer, or everything.
    sharding: Sharding = "none"
    # Activations that the backward pass computes again: none; those of attention, norms and activation functions;
    # those of whole layers.
    recompute: Recompute = "none"
    # Communication that runs beside computation: none; that of gradients, weights and stages; that of tensor and
    # expert parallelism, too.
    overlap: Overlap = "gradients"

    @property
    def dp(self) -> int:
        """Copies that divide the batch."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.gpus // self.pp

    @property
    def micro_batches(self) -> int:
        """Passes of one copy in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def expert_copies(self) -> int:
        """Ranks that hold the same experts."""
        return self.stage_ranks // self.ep

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank, before they are divided by ``tp``."""
        return -(-self.micro_batch * self.sequence // self.cp)

    @property
    def layer(self) -> Layout:
        """Layout of the dense operators of a layer."""
        return Layout(self.tp, 1, 1, 1)

    def check(self, config: LLMConfig, *, batch: bool = True) -> None:
        """Raise :class:`FieldError` where the model or, with ``batch``, the batch cannot be split so."""
        limits = {
            "gpus": MAX_RANKS,
            "sequence": MAX_SEQUENCE,
            "global_batch": MAX_GLOBAL_BATCH,
            "micro_batch": MAX_GLOBAL_BATCH,
        }
        for name in ("gpus", "tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "global_batch", "sequence"):
            check_whole(name, getattr(self, name), limits.get(name, MAX_RANKS))
        for name, kind in (("sharding", Sharding), ("recompute", Recompute), ("overlap", Overlap)):
            if getattr(self, name) not in get_args(kind):
                raise FieldError.at(
                    name,
                    f"{str(getattr(self, name))[:80]!r} is not allowed",
                    hint="one of: " + ", ".join(get_args(kind)),
                )
        ranks = self.tp * self.pp * self.cp
        if self.gpus % ranks:
            raise FieldError.at(
                "gpus", f"{self.gpus} is no multiple of tp * pp * cp = {ranks}", hint=f"use a multiple of {ranks}"
            )
        if self.cp > self.sequence:
            raise FieldError.at("cp", f"{self.cp} ranks share {self.sequence} tokens", hint="use fewer ranks")
        allowed = allowed_tp(config)
        if self.tp not in allowed and not _divides(config, self.tp):
            raise FieldError.at(
                "tp", f"{self.tp} does not divide the model", hint="allowed: " + ", ".join(map(str, allowed))
            )
        if self.pp * self.virtual_pp > config.layers + 2:
            raise FieldError.at(
                "pp",
                f"{self.pp} stages of {self.virtual_pp} parts for {config.layers} layers",
                hint=f"pp * virtual_pp is at most {config.layers + 2}",
            )
        if self.virtual_pp > 1 and self.pp == 1:
            raise FieldError.at("virtual_pp", "there is one stage", hint="use virtual_pp=1, or pp > 1")
        self._check_experts(config)
        if batch and self.global_batch % (self.micro_batch * self.dp):
            raise FieldError.at(
                "global_batch",
                f"{self.global_batch} is no multiple of micro_batch * copies = {self.micro_batch} * {self.dp}",
                hint="change global_batch or micro_batch",
            )

    def _check_experts(self, config: LLMConfig) -> None:
        if config.experts is None:
            if self.ep != 1:
                raise FieldError.at("ep", f"{self.ep}, but {config.model_type} has no experts", hint="use ep=1")
        elif config.experts.count % self.ep or self.stage_ranks % self.ep:
            raise FieldError.at(
                "ep",
                f"{self.ep} does not divide {config.experts.count} experts and {self.stage_ranks} ranks of a stage",
                hint="use a divisor of both",
            )

    def named(self) -> str:
        """Degrees as text."""
        names = ("tp", "pp", "virtual_pp", "cp", "ep")
        degrees = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1 or name in ("tp", "pp")]
        return ", ".join([*degrees, f"micro_batch={self.micro_batch}", self.sharding, f"recompute {self.recompute}"])


def _divides(config: LLMConfig, tp: int) -> bool:
    """Whether ``tp`` divides heads and columns; experts need not be divided."""
    kv_heads = config.heads if config.latent is not None else config.kv_heads
    heads = config.heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    return heads and (not config.dense_layers or config.intermediate % tp == 0)


def training_types(dtype: Any, products: Any, device: DeviceSpec) -> Types:
    """Element types of a training step; FieldError for an unknown one, or one that the device has no units for."""
    if dtype not in ("bfloat16", "float16", "float32"):
        raise FieldError.not_allowed("dtype", dtype, hint="bfloat16, float16, float32")
    if products is None:
        return Types(dtype)
    if products not in PRODUCTS or dtype == "float32":
        raise FieldError.at(
            "products",
            f"{str(products)[:80]!r} with {dtype} is not allowed",
            hint="one of: " + ", ".join(PRODUCTS) + ", with a 16-bit dtype",
        )
    if not _has_units(device, products):
        having = ", ".join(other.name for other in known() if _has_units(other, products) and not other.status)
        raise FieldError.at(
            "products",
            f"{device.name} has no units for {products}",
            hint=f"leave products out; devices with such units: {having}",
        )
    return Types(dtype, *PRODUCTS[products])


def _has_units(device: DeviceSpec, products: str) -> bool:
    """Whether a device multiplies operands of a type; NVFP4 is a format of one vendor."""
    return getattr(device, _UNITS[products]) is not None and (products != "nvfp4" or device.vendor == "NVIDIA")
