"""Types of the fields of specifications, with their validation."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cdmpp.programs.elements import MAX_EXTENT, DTypeName, canonical_dtype

DType = Annotated[DTypeName, BeforeValidator(canonical_dtype)]


def whole_number(value: Any) -> Any:
    """JSON has one number type: 512.0 is the integer 512; 512.5 and NaN are not integers."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


Extent = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=1, le=MAX_EXTENT)]
Offset = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=0, le=MAX_EXTENT)]
Flag = Annotated[bool, Field(strict=True)]
