"""Element types of tensors, and the combinations of types that products have.

A product has a type of its activations and arithmetic (``dtype``), a type of its weights (``weight_dtype``,
None: the same) and a ``scaling``:

- ``tensor``: static scales, one per tensor;
- ``channel``: a scale per row of the activations, computed at run time, and per output channel of the weight;
- ``block128``: scales of 1x128 blocks of the activations and 128x128 blocks of the weight;
- ``mx32``: blocks of 32 along k with exponents of 8 bits (OCP microscaling formats);
- ``nvfp4``: blocks of 16 along k with scales of type float8_e4m3.

Without scaling, the product is bare: no quantisation, no scales.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from cdmpp.errors import InvalidProgramError

#: Other spellings of element types, as texts and requests may use them.
DTYPE_ALIASES = {
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("i8", "s8"), "int8"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("tf32", "xf32"), "tfloat32"),
    **dict.fromkeys(("fp8", "f8", "e4m3", "float8", "float8_e4m3fn", "float8_e4m3fnuz"), "float8_e4m3"),
    **dict.fromkeys(("fp4", "f4", "e2m1", "float4", "nvfp4", "mxfp4", "float4_e2m1fn"), "float4_e2m1"),
    **dict.fromkeys(("i4", "s4"), "int4"),
}


def canonical_dtype(value: Any) -> Any:
    """The element type of a known spelling; "torch.float16" is float16. Other values are returned as they are."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


DTypeName = Literal[
    "float32", "float16", "bfloat16", "int8", "float64", "tfloat32", "float8_e4m3", "float4_e2m1", "int4"
]
#: Bytes of an element in memory. tfloat32 is stored as float32 and multiplied with fewer bits.
DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "float64": 8,
    "tfloat32": 4,
    "float8_e4m3": 1,
    "float4_e2m1": 0.5,
    "int4": 0.5,
}
#: Types that every operator exists for.
BASIC_DTYPES = ("float32", "float16", "bfloat16", "int8")

#: Largest size of one axis. Products of axes stay exact in float64, which the features are made in.
MAX_EXTENT = 2**31 - 1
#: Largest accepted tensor or iteration count; a larger one is probably a typing error.
MAX_ELEMENTS = 2**48
#: Maximum length of an operator's text in a request, and of a part of it in a message.
MAX_PROGRAM_TEXT, MAX_SHOWN = 2000, 200

Scaling = Literal["tensor", "channel", "block128", "mx32", "nvfp4"]
SCALINGS: tuple[str, ...] = get_args(Scaling)
#: Storage of the two operands of a product, row by row: "n" as written in the product, "t" transposed.
Layout = Literal["nn", "nt", "tn", "tt"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

#: Types whose products accept scales, with the scalings of activations and weights of that type.
_SAME: dict[str, tuple[str, ...]] = {
    "float8_e4m3": ("tensor", "channel", "block128", "mx32"),
    "int8": ("tensor", "channel"),
    "float4_e2m1": ("mx32", "nvfp4"),
}
#: Type of the weight -> its scalings when the activations are of a wider type.
_WEIGHT: dict[str, tuple[str, ...]] = {
    "int8": ("tensor", "channel", "block128"),
    "float8_e4m3": ("tensor", "channel", "block128", "mx32"),
    "int4": ("channel", "block128"),
    "float4_e2m1": ("mx32", "nvfp4"),
}
#: Type of the activations -> narrower types of the weight.
_MIXED: dict[str, tuple[str, ...]] = {
    "float16": tuple(_WEIGHT),
    "bfloat16": tuple(_WEIGHT),
    "float8_e4m3": ("int4", "float4_e2m1"),
    "int8": ("int4",),
}
#: Types of a bare product.
BARE_DTYPES = tuple(name for name in DTYPE_BYTES if name != "int4")
#: Scaling of a product of experts that states none.
_EXPERTS = {"float8_e4m3": "tensor", "int8": "channel", "float4_e2m1": "nvfp4"}
#: Scaling of a weight of a narrower type than the activations that states none.
_NARROW = {"int8": "channel", "float8_e4m3": "channel", "int4": "block128", "float4_e2m1": "mx32"}


#: Structural fields in a :func:`types_label`.
LABEL_FIELDS = ("weight_dtype", "scaling", "kv_dtype")
#: Structural fields that a program of one 16-bit type leaves out.
NARROW_FIELDS = (*LABEL_FIELDS, "accumulate")


def types_label(dtype: str, fields: Mapping[str, Any]) -> str:
    """Element types of a program as one text: "float8_e4m3", "bfloat16+int4+block128", "bfloat16+kv_float8_e4m3".

    ``fields`` are its structural fields. Programs of different labels are different types to training coverage.
    """
    parts = [str(value) for name in ("weight_dtype", "scaling") if (value := fields.get(name)) is not None]
    if (cache := fields.get("kv_dtype")) is not None:
        parts.append(f"kv_{cache}")
    return "+".join([dtype, *parts])


def base_type(label: str) -> str:
    """The type of the arithmetic of a :func:`types_label`."""
    return label.partition("+")[0]


def combinations(dtype: str, *, experts: bool = False) -> Iterator[tuple[str | None, str | None]]:
    """Pairs (weight_dtype, scaling) that exist for activations of a type; ``experts``: no bare narrow products."""
    if dtype in BARE_DTYPES and not (experts and dtype in _EXPERTS):
        yield None, None
    for scaling in _SAME.get(dtype, ()):
        yield None, scaling
    for weight in _MIXED.get(dtype, ()):
        for scaling in _WEIGHT[weight]:
            yield weight, scaling


def complete(dtype: Any, weight_dtype: Any, scaling: Any, *, experts: bool = False) -> tuple[Any, Any]:
    """``weight_dtype`` and ``scaling`` with defaults filled in; a weight of the activations' type is None."""
    weight = None if weight_dtype == dtype else weight_dtype
    if scaling is None and weight is not None:
        scaling = _NARROW.get(weight)
    elif scaling is None and experts:
        scaling = _EXPERTS.get(dtype)
    return weight, scaling


def completed_fields(fields: Any, *, default: str = "float32", experts: bool = False) -> Any:
    """Fields of a specification with :func:`complete` types; anything but a mapping is returned as it is."""
    if not isinstance(fields, dict):
        return fields
    dtype = canonical_dtype(fields.get("dtype", default))
    given = canonical_dtype(fields.get("weight_dtype")), fields.get("scaling")
    weight, scaling = complete(dtype, *given, experts=experts)
    return {**fields, "weight_dtype": weight, "scaling": scaling}


def check_types(
    operator: str, dtype: str, weight_dtype: str | None, scaling: str | None, *, experts: bool = False
) -> None:
    """Raise :class:`InvalidProgramError` for a combination of types and scaling that does not exist."""
    pairs = list(combinations(dtype, experts=experts))
    if (weight_dtype, scaling) in pairs:
        return
    weights = sorted({weight or dtype for weight, _ in pairs})
    scalings = [s for weight, s in pairs if weight == weight_dtype]
    if not scalings:
        wider = DTYPE_BYTES[weight_dtype or dtype] > DTYPE_BYTES[dtype]
        activations = [name for name, narrow in _MIXED.items() if (weight_dtype or dtype) in narrow]
        raise InvalidProgramError(
            f"{operator}: no product of {dtype} activations with weights of type {weight_dtype or dtype}"
            + (": a weight is not wider than the activations" if wider else ""),
            hint=f"weight_dtype for dtype={dtype}: {', '.join(weights) or 'none, it is a type of weights only'}"
            + (f"; dtype for weight_dtype={weight_dtype or dtype}: {', '.join(activations)}" if activations else ""),
        )
    scaled = [s for s in scalings if s is not None]
    hint = "one of: " + ", ".join(scaled) if scaled else "leave scaling out"
    raise InvalidProgramError(
        f"{operator}: no scaling {scaling!r} for {dtype} activations and {weight_dtype or dtype} weights",
        hint=hint + (", or leave scaling out" if scaled and None in scalings else ""),
    )
