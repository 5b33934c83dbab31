"""Element types of tensors, and the field types of operator specifications."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

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
DType = Annotated[DTypeName, BeforeValidator(canonical_dtype)]
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


def whole_number(value: Any) -> Any:
    """JSON has one number type: 512.0 is the integer 512; 512.5 and NaN are not integers."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


Extent = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=1, le=MAX_EXTENT)]
Offset = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=0, le=MAX_EXTENT)]
Flag = Annotated[bool, Field(strict=True)]
