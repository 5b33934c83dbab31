"""Parsing of the program texts of records into operator blocks and TVM programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from cdmpp.data.assemble import CODE, Group, Reasons, check_groups
from cdmpp.data.fields import default_dtype, flag_defaults, integer_fields
from cdmpp.data.labels import Labels
from cdmpp.data.packed_texts import PackedTexts
from cdmpp.data.raw import IntColumn, RawTable
from cdmpp.data.table import Int64, OperatorBlock, TvmPrograms
from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.programs.operators import operator_types, parse_operator

_ABSENT = object()
#: Characters of TVM programs from which on they are compressed in memory.
PACKED_FROM = 200_000_000


@dataclass(frozen=True)
class ParsedPrograms:
    """Programs of a file, and per row the key, the reason against it (0: none) and the operator's name."""

    blocks: tuple[OperatorBlock, ...]
    tvm: TvmPrograms
    key: Int64
    reason: Reasons
    op: Labels


def read_programs(texts: Labels, kinds: Labels, raw: RawTable) -> ParsedPrograms:
    """Parse each distinct program once.

    Parameters
    ----------
    texts, kinds : Labels
        Columns ``program`` and ``program_kind``.
    raw : RawTable
        Holds ``program_hash`` and ``task``, which TVM programs need.
    """
    is_operator, is_tvm = kinds.is_("operator"), kinds.is_("tvm_json")
    blocks, key_of, reason_of, names = _operators(texts, np.unique(texts.codes[is_operator]))
    key = np.where(is_operator, key_of[texts.codes], -1)
    reason = np.where(is_operator, reason_of[texts.codes], CODE["missing_program"]).astype(np.int32)
    op = Labels(np.where(is_operator, texts.codes, len(names)).astype(np.int32), (*names, "tvm"))
    tvm = TvmPrograms(first_key=sum(map(len, blocks)))
    if is_tvm.any():
        tvm = _tvm_programs(texts, raw, np.flatnonzero(is_tvm), tvm.first_key, key, reason)
    return ParsedPrograms(blocks, tvm, key, reason, op.map(str))


def _operators(texts: Labels, codes: Int64) -> tuple[tuple[OperatorBlock, ...], Int64, Reasons, list[str]]:
    """Blocks of the operators at ``codes``; key, reason and operator name for every code of ``texts``."""
    count = len(texts.names)
    reason = np.full(count, CODE["missing_program"], dtype=np.int32)
    names = [""] * count
    dtypes = [""] * count
    members: dict[tuple[Any, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for code in codes.tolist():
        fields = _fields(texts.names[code])
        operator = fields.get("operator")
        if not isinstance(operator, str):
            continue
        names[code], dtypes[code] = operator, str(fields.get("dtype", default_dtype(operator)))
        if operator not in operator_types():
            reason[code] = CODE["unknown_operator"]
            continue
        flags = {n: fields.get(n, default) for n, default in flag_defaults(operator).items()}
        known = fields.keys() <= operator_types()[operator].model_fields.keys()
        if known and all(isinstance(v, bool | int | float | str | None) for v in flags.values()):
            members.setdefault((operator, dtypes[code], *flags.items()), []).append((code, fields))
    groups = []
    for (operator, dtype, *given), found in members.items():
        structural = _structural(operator, dtype, dict(given))
        if structural is not None:
            groups.append(_group(operator, structural, found, count))
    blocks, key_of, checked = check_groups(groups, Labels.of(dtypes))
    for group in groups:
        reason[group.rows] = checked[group.rows]
    return blocks, key_of, reason, names


def _group(operator: str, flags: dict[str, Any], found: list[tuple[int, Mapping[str, Any]]], count: int) -> Group:
    """Sizes of one operator as columns over all programs."""
    index = np.array([code for code, _ in found], dtype=np.int64)
    rows = np.zeros(count, dtype=np.bool_)
    rows[index] = True
    sizes = {}
    for info in integer_fields(operator):
        if info.name in flags:
            continue
        default = _ABSENT if info.default is None else info.default
        column = [fields.get(info.name, default) for _, fields in found]
        whole = [_whole(value) for value in column]
        filled = IntColumn.constant(0, count)
        filled.values[index] = [0 if value is None else value for value in whole]
        missing, invalid = filled.missing, filled.invalid.copy()
        missing[index] = [value is _ABSENT for value in column]
        invalid[index] = [w is None and v is not _ABSENT for w, v in zip(whole, column, strict=True)]
        sizes[info.name] = IntColumn(filled.values, missing, invalid)
    return Group(operator, rows, sizes, flags)


def _fields(text: str) -> dict[str, Any]:
    """Fields of an operator from JSON or from its short text; empty when it is neither."""
    if not text.lstrip().startswith("{"):
        try:
            return parse_operator(text).canonical()
        except CdmppError:
            return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _structural(operator: str, dtype: str, flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Structural fields as the specification reads them; None when it refuses one or their combination."""
    kind = operator_types()[operator]
    if dtype not in kind.dtypes:
        return dict(flags)  # check_groups gives the reason
    sizes = {info.name: info.low for info in integer_fields(operator) if info.default is None}
    try:
        spec = kind.model_validate({"operator": operator, "dtype": dtype, **sizes, **flags})
        spec.check_types()
    except (ValidationError, InvalidProgramError):
        return None
    return {name: getattr(spec, name) for name in flags}


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**62 else None


def _tvm_programs(
    texts: Labels, raw: RawTable, rows: Int64, first_key: int, key: Int64, reason: Reasons
) -> TvmPrograms:
    """Number the TVM programs by their hash; rows without text or hash keep their reason."""
    hashes, tasks = raw.labels("program_hash"), raw.labels("task")
    index: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []
    numbers = []
    for row in rows.tolist():
        digest, text = hashes[row], texts[row]
        if not digest or not text:
            numbers.append(-1)
            continue
        number = index.setdefault(digest, len(index))
        if number == len(pairs):
            pairs.append((text, tasks[row]))
        numbers.append(number)
    numbered = np.array(numbers, dtype=np.int64)
    good = rows[numbered >= 0]
    key[good] = first_key + numbered[numbered >= 0]
    reason[good] = 0
    long = sum(len(text) for text, _ in pairs) > PACKED_FROM
    programs = (text for text, _ in pairs)
    return TvmPrograms(
        first_key, tuple(index), PackedTexts(programs) if long else tuple(programs), tuple(t for _, t in pairs)
    )
