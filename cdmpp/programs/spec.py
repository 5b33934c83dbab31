"""Base class of operator specifications: sizes, identity, structural class."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.elements import BASIC_DTYPES, MAX_ELEMENTS, MAX_EXTENT, DTypeName, canonical_dtype

DType = Annotated[DTypeName, BeforeValidator(canonical_dtype)]


def whole_number(value: Any) -> Any:
    """JSON has one number type: 512.0 is the integer 512; 512.5 and NaN are not integers."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


Extent = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=1, le=MAX_EXTENT)]
Offset = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=0, le=MAX_EXTENT)]
Flag = Annotated[bool, Field(strict=True)]
#: A rule about sizes: where it is broken (bool, or bool array for arrays of sizes), what is wrong, what to do.
Violation = tuple[Any, str, str]


#: Made once: json.dumps makes one per call.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _at_least_one(size: Any) -> Any:
    # numpy takes a microsecond per number.
    return max(size, 1.0) if isinstance(size, float) else np.maximum(size, 1.0)


class OperatorSpec(BaseModel):
    """One operator with its sizes. Extents are counts of elements, at least 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    operator: str
    dtype: DType = "float32"

    #: Fields that select another lowered structure instead of another size.
    structural_fields: ClassVar[tuple[str, ...]] = ()
    #: Element types that the operator exists for.
    dtypes: ClassVar[tuple[str, ...]] = BASIC_DTYPES

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        """Rules about sizes that ``fields`` may break; sizes are integers or int64 arrays of one length."""
        yield from ()

    def check_types(self) -> None:
        """Raise :class:`InvalidProgramError` when the operator does not exist for its element types."""
        if self.dtype not in self.dtypes:
            raise InvalidProgramError(
                f"{self.operator}: no such operator for dtype {self.dtype}", hint="one of: " + ", ".join(self.dtypes)
            )

    def check(self) -> None:
        """Raise :class:`InvalidProgramError` when the fields contradict each other."""
        self.check_types()
        fields = self.model_dump()
        for broken, problem, hint in self.violations(fields):
            if broken:
                shown = re.sub(r"\w+", lambda m: f"{m[0]}={fields[m[0]]}" if m[0] in fields else m[0], problem)
                raise InvalidProgramError(f"{self.operator}: {shown}", hint=hint)
        elements = self.elements({name: float(size) for name, size in self.sizes().items()})
        if elements > MAX_ELEMENTS:
            raise InvalidProgramError(
                f"{self.operator}: its sizes are too large: a tensor or loop nest has {elements:.3g} elements",
                hint=f"at most 2^48 = {MAX_ELEMENTS:.3g}; reduce one of " + ", ".join(self._largest_sizes()),
            )

    def _largest_sizes(self) -> list[str]:
        """The three largest sizes as ``name=value``."""
        ordered = sorted(self.sizes().items(), key=lambda item: -item[1])
        return [f"{name}={size}" for name, size in ordered[:3]]

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        """An upper bound on any tensor or loop nest, for sanity checks.

        ``sizes`` are the integer fields as float or float64 arrays; exact up to 2^53.
        """
        return reduce(operator.mul, (_at_least_one(v) for name, v in sizes.items() if name != "past_len"))

    @abstractmethod
    def tensor_bytes(self) -> float:
        """Bytes of all inputs, weights and results together."""

    def sizes(self) -> dict[str, int]:
        """The integer fields, in declaration order: what a template's symbols are bound to."""
        return {
            name: value
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), int) and not isinstance(value, bool)
        }

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Structural flags that follow from sizes; ``fields`` holds scalars or arrays of one value."""
        return {}

    @classmethod
    def structural_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """All structural flags (see :mod:`.templates`); a field that is None is not one."""
        structure = {name: value for name in cls.structural_fields if (value := fields[name]) is not None}
        return structure | cls.shape_flags(operator, fields)

    @classmethod
    def derived_sizes(cls, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes of the lowered structure besides the fields, for integers or int64 arrays."""
        return {}

    def bindings(self) -> dict[str, int]:
        """Values of a template's symbols: the integer fields and the derived sizes."""
        sizes = self.sizes()
        structure = {name: getattr(self, name) for name in self.structural_fields}
        return sizes | self.derived_sizes({**structure, **sizes})

    def structural_class(self) -> str:
        """Key of the lowered structure that this specification shares with other sizes."""
        flags = self.structural_flags(self.operator, self.model_dump())
        return ":".join([self.operator, self.dtype, *(f"{k}={v}" for k, v in flags.items())])

    def canonical(self) -> dict[str, Any]:
        """All fields that are not None, defaults filled in, in a fixed order: the identity of the program."""
        return self.model_dump(exclude_none=True)

    def hash(self) -> str:
        """Structural hash (hex, 32 characters): equal for equal programs, whatever their source."""
        return hashlib.sha256(b"operator\0" + _CANONICAL.encode(self.canonical()).encode()).hexdigest()[:32]

    def text(self) -> str:
        """Short text that :func:`parse_operator` reads back; fields at their default are left out."""
        shown = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "operator" and (name == "dtype" or value != field.default):
                shown.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return f"{self.operator}:{','.join(shown)}"
