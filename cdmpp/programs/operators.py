"""Registry of operator specifications, and how they are written and read.

Every operator of the public tables and of the ONNX front end is one small frozen model of this package. A
specification is a plain value: it has its sizes, its canonical text (``linear:m=512,...``), its structural class
(which lowered TIR it shares with other sizes) and nothing about TVM.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError, violation_text
from cdmpp.programs.attention import Attention, AttentionBackward, AttentionMixed, LatentAttention
from cdmpp.programs.collectives import Collective, SendRecv, is_collective
from cdmpp.programs.elements import DTYPE_BYTES, MAX_SHOWN
from cdmpp.programs.products import BatchMatmul, GroupedGemm, Linear, Moe
from cdmpp.programs.spec import OperatorSpec as OperatorSpec
from cdmpp.programs.vectors import (
    BatchNorm,
    Binary,
    Conv2d,
    Copy,
    Embedding,
    FusedAddRmsNorm,
    KvCacheSave,
    MoeGating,
    MoeShuffle,
    NormBackward,
    Pool2d,
    RotaryEmbedding,
    RowWise,
    Scalar,
    SiluAndMul,
    SoftmaxCrossEntropy,
    Unary,
)

PRODUCT_ALIASES = ("matmul", "gemm", "mm")

SPEC_TYPES: tuple[type[OperatorSpec], ...] = (
    Linear,
    BatchMatmul,
    Conv2d,
    Unary,
    Binary,
    Scalar,
    RowWise,
    SiluAndMul,
    Copy,
    Embedding,
    Pool2d,
    BatchNorm,
    Attention,
    AttentionMixed,
    LatentAttention,
    Moe,
    GroupedGemm,
    RotaryEmbedding,
    KvCacheSave,
    MoeGating,
    MoeShuffle,
    FusedAddRmsNorm,
    NormBackward,
    SoftmaxCrossEntropy,
    AttentionBackward,
    Collective,
    SendRecv,
)


@cache
def operator_types() -> dict[str, type[OperatorSpec]]:
    """Operator name -> its specification class."""
    table: dict[str, type[OperatorSpec]] = {}
    for spec in SPEC_TYPES:
        for name in get_args(spec.model_fields["operator"].annotation):
            table[name] = spec
    return table


def lowered_operators() -> dict[str, type[OperatorSpec]]:
    """The operators that are tensor programs: all but the collectives, which have no structure and no features."""
    return {name: spec for name, spec in operator_types().items() if not is_collective(name)}


def operator_family(operator: str) -> str:
    """Coarse family of an operator: ``gemm``, ``moe``, ``conv``, ``attention``, ``vector``, ``collective``."""
    if is_collective(operator):
        return "collective"
    if operator in ("linear", "bmm"):
        return "gemm"
    if operator in ("moe", "moe_w13", "grouped_gemm"):
        return "moe"
    if operator == "conv2d":
        return "conv"
    return "attention" if operator.startswith(("attention", "mla_")) else "vector"


def structural_flags(operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields besides operator and dtype that select the lowered structure (see :mod:`.templates`).

    ``fields`` may hold scalars or arrays of one value: only comparisons are made here.
    """
    return operator_types()[operator].structural_flags(operator, fields)


def derived_sizes(operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that a lowered structure has besides the operator's integer fields; mostly none.

    ``fields`` holds the integer fields, as integers or int64 arrays, and the structural fields.
    """
    return operator_types()[operator].derived_sizes(fields)


def make_operator(fields: Mapping[str, Any]) -> OperatorSpec:
    """Build and check a specification from its fields.

    Raises UnsupportedOperatorError: ``operator`` is not one of :func:`operator_types` (the hint lists them).
    Raises InvalidProgramError: a field is missing, unknown, of the wrong type, out of range, or contradicts another.
    """
    name = fields.get("operator")
    if isinstance(name, str) and name in PRODUCT_ALIASES:
        name = "bmm" if "batch" in fields else "linear"
        fields = {**fields, "operator": name}
    if not isinstance(name, str) or name not in operator_types():
        raise unknown_operator(name)
    kind = operator_types()[name]
    try:
        spec = kind.model_validate(dict(fields))
    except ValidationError as error:
        problems = "; ".join(_problem(violation, kind) for violation in error.errors()[:4])
        wanted = ", ".join(
            f"{field}{'' if info.is_required() else f'={info.default}'}"
            for field, info in kind.model_fields.items()
            if field != "operator"
        )
        raise InvalidProgramError(
            f"{name}: {problems}", hint=f"{name} takes {wanted}{_quantised(kind, error)}"
        ) from None
    spec.check()
    return spec


def _quantised(kind: type[OperatorSpec], error: ValidationError) -> str:
    """How quantised types are written, where an element type is wrong: dtypes are not named "w8a8" or "fp8_block"."""
    types = any(violation["loc"][:1] in (("dtype",), ("weight_dtype",)) for violation in error.errors())
    if not types or "scaling" not in kind.model_fields:
        return ""
    return "; quantised: dtype=fp8,scaling=block128, or dtype=bfloat16,weight_dtype=int4 for weights only"


def _problem(error: ErrorDetails, kind: type[OperatorSpec]) -> str:
    """One violation of a specification, with the offending value."""
    place = ".".join(map(str, error["loc"]))
    message = violation_text(error["type"], error["msg"])
    if error["type"] == "extra_forbidden":
        nearest = difflib.get_close_matches(place[:64], kind.model_fields, n=1)
        message += f" (did you mean {nearest[0]}?)" if nearest else ""
    elif place and error["type"] not in ("missing", "value_error"):
        value = error["input"]
        # Python refuses to write integers of many thousand digits.
        message += f", not {value!r}"[:MAX_SHOWN] if not isinstance(value, int) or abs(value) < 10**100 else ""
    return f"{place}: {message}" if place else message


def _nearest_operators(name: str, known: Sequence[str]) -> list[str]:
    """At most four names: of equal spelling but for a few letters, else with a word in common, else similar ones."""
    alike = difflib.get_close_matches(name, known, n=2, cutoff=0.8)
    words = {word for word in name.split("_") if len(word) > 2} - {"fused"}
    related = [operator for operator in known if words & set(operator.split("_"))]
    return (alike or related or difflib.get_close_matches(name, known, n=3))[:4]


def unknown_operator(name: Any) -> UnsupportedOperatorError:
    """The error for a name that is not one of :func:`operator_types`, with the nearest names."""
    known = sorted(operator_types())
    nearest = _nearest_operators(name[:64].casefold(), known) if isinstance(name, str) else []
    suggestion = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    return UnsupportedOperatorError(
        f"operator {repr(name)[:MAX_SHOWN]} is not supported{suggestion}", hint="one of: " + ", ".join(known)
    )


def parse_operator(text: str) -> OperatorSpec:
    """Read ``linear:m=512,n=4096,k=1024,dtype=float16``.

    Raises UnsupportedOperatorError or InvalidProgramError: as :func:`make_operator`; also when the text is not
    ``name:key=value,...``.
    """
    return make_operator(operator_fields(text))


def read_operator(text: str) -> OperatorSpec:
    """Read an operator from its text or from the JSON of its fields; raises as :func:`make_operator`."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    return make_operator(fields) if isinstance(fields, dict) else parse_operator(text)


def operator_fields(text: str, read: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Fields of an operator's text; its values are not checked, so they may be expressions (``m=batch*128``).

    ``read``: reads a value; default: :func:`read_value`.
    Raises InvalidProgramError: the text is not ``name:key=value,...``.
    """
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {"operator": name.strip()}
    for part in filter(None, map(str.strip, _split(rest))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or key in fields:
            raise InvalidProgramError(
                f"{text[:MAX_SHOWN]!r}: {part[:MAX_SHOWN]!r} is not key=value, or repeats a key",
                hint="write an operator as linear:m=512,n=4096,k=1024,dtype=float16",
            )
        fields[key] = (read or read_value)(value)
    return fields


def _split(text: str) -> Iterator[str]:
    """Parts between commas; commas between brackets are arguments of min and max."""
    start, depth = 0, 0
    for at, character in enumerate(text):
        if character == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        else:
            depth += (character == "(") - (character == ")")
    yield text[start:]


def read_value(text: str) -> Any:
    """A value as it is written in text: a flag, a number, else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def resident_bytes(operator: OperatorSpec) -> tuple[float, float]:
    """Bytes of the weights and of the cache of one operator; scales of quantised weights are not counted."""
    fields = operator.model_dump()
    weight = DTYPE_BYTES[fields.get("weight_dtype") or operator.dtype]
    cache = DTYPE_BYTES[fields.get("kv_dtype") or operator.dtype]
    return _weights(operator.operator, fields) * weight, _cache(operator.operator, fields) * cache


def _weights(name: str, f: dict[str, Any]) -> float:
    """Elements of the weights."""
    if name == "linear":
        return float(f["n"] * f["k"])
    if name == "grouped_gemm":
        return float(f["groups"] * f["n"] * f["k"])
    if name in ("moe", "moe_w13"):
        columns = (2 if f["gated"] else 1) + (name == "moe")
        return float(f["experts"] / f["ep"] * columns * f["hidden"] * f["intermediate"] / f["tp"])
    if name in ("mla_prefill", "mla_decode") and f["module"]:
        down = f["hidden"] * (f["q_latent"] + f["latent"] + f["rope"])
        up = f["q_latent"] * f["heads"] * (f["nope"] + f["rope"])
        expand = f["latent"] * f["heads"] * (f["nope"] + f["v_dim"])
        return float(down + up + expand + f["heads"] * f["v_dim"] * f["hidden"])
    return 0.0


def _cache(name: str, f: dict[str, Any]) -> float:
    """Elements of the cached keys and values, or latents."""
    if name == "attention_decode":
        return float(f["batch"] * (f["past_len"] + f["q_len"]) * 2 * f["kv_heads"] * f["head_dim"])
    if name == "mla_decode":
        return float(f["batch"] * (f["past_len"] + f["q_len"]) * (f["latent"] + f["rope"]))
    return 0.0
