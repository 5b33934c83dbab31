"""A pool of programs to choose from: what a model was trained on, in some thousand operator texts.

A model folder carries one (:data:`POOL`), so that ``cdmpp select`` has typical programs without the training
data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.load import load_table
from cdmpp.data.physics import work
from cdmpp.data.table import MeasurementTable, OperatorBlock
from cdmpp.errors import ArtifactError, CdmppError, DataError
from cdmpp.programs.operators import OperatorSpec, read_operator
from cdmpp.utils.files import MAX_REQUEST_BYTES, parse_file, read_json

#: File of a model folder.
POOL = "programs.json"
POOL_PROGRAMS = 2000
#: Programs that any GPU can hold and run in a blink: bytes moved, and floating-point operations.
_MOST_BYTES, _MOST_FLOPS = 4e9, 2e13
_KEY = "cdmpp_programs"
_FORMAT = 1


def pool_of(table: MeasurementTable, keys: NDArray[Any], *, programs: int = POOL_PROGRAMS, seed: int = 0) -> bytes:
    """Content of :data:`POOL` for a model folder: JSON of about ``programs`` programs.

    Every kind (operator, element type, structure) has a share that grows with the root of its number of programs.
    ``keys`` are program keys of *training* rows (repeats do not matter). Those of other parts must not be among them:
    measurements of the pool's programs become training rows.
    """
    wanted = np.zeros(table.n_programs, dtype=np.bool_)
    wanted[np.unique(keys[keys >= 0])] = True
    blocks = [(block, np.flatnonzero(wanted[block.row_index] & _modest(block))) for block in table.programs]
    blocks = [(block, index) for block, index in blocks if len(index)]
    roots = np.sqrt([len(index) for _, index in blocks])
    rng = np.random.default_rng(seed)
    texts: list[str] = []
    for (block, index), root in zip(blocks, roots, strict=True):
        share = min(len(index), max(1, round(programs * root / roots.sum())))
        texts += [block.spec(int(i)).text() for i in np.sort(rng.choice(index, share, replace=False))]
    return (json.dumps({_KEY: _FORMAT, "programs": texts}, indent=0) + "\n").encode()


def _modest(block: OperatorBlock) -> NDArray[np.bool_]:
    flops, moved = work(block.operator, block.dtype, block.flags, block.sizes)
    return np.asarray((flops <= _MOST_FLOPS) & (moved <= _MOST_BYTES))


def model_pool(folder: Path) -> list[OperatorSpec]:
    """The pool that a model carries; a DataError if it carries none, an ArtifactError if it cannot be read."""
    path = folder / POOL
    if not path.is_file():
        raise DataError(
            f"the model {folder} carries no pool of programs ({POOL})",
            hint="name programs to choose from: --pool FILE (records, a public table, or a text file with an "
            "operator such as linear:m=512,n=4096,k=1024 on each line)",
        )
    try:
        return read_pool(path)
    except DataError as error:
        raise ArtifactError(error.message, hint="copy the model folder again, or retrain") from None


def read_pool(path: Path) -> list[OperatorSpec]:
    """Distinct operators of a pool: records, any table, a model's :data:`POOL`, or a text file of operators. The error
    names the number of a line that is no operator."""
    if path.is_dir() and (path / POOL).is_file():
        path = path / POOL
    operators = _from_json(path) or _from_lines(path) or _from_table(path)
    if not operators:
        raise DataError(f"{path} holds no operators", hint="programs are operators such as linear:m=1,n=2,k=3")
    return list({spec.hash(): spec for spec in operators}.values())


def _from_json(path: Path) -> list[OperatorSpec]:
    if path.suffix != ".json":
        return []
    content = read_json(path, f"a model's {POOL}", max_bytes=MAX_REQUEST_BYTES)
    try:
        texts = content["programs"] if content[_KEY] == _FORMAT else None
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} is no pool of programs: {error}", hint=f"a model's {POOL}") from None
    if not isinstance(texts, list):
        raise DataError(f"{path} is of another version", hint="use the cdmpp version that wrote it")
    return _parsed(path, enumerate(map(str, texts), 1), "program")


def _from_lines(path: Path) -> list[OperatorSpec]:
    if path.suffix != ".txt":
        return []
    hint = "a text file of operators"
    lines = parse_file(path, lambda text: text.decode().splitlines(), "text", hint, max_bytes=MAX_REQUEST_BYTES)
    stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
    return _parsed(path, ((n, line) for n, line in stripped if line and not line.startswith("#")), "line")


def _parsed(path: Path, texts: Iterable[tuple[int, str]], what: str) -> list[OperatorSpec]:
    operators = []
    for number, text in texts:
        try:
            operators.append(read_operator(text))
        except CdmppError as error:
            raise DataError(f"{path}, {what} {number}: {error.message}", hint=error.hint) from None
    return operators


def _from_table(path: Path) -> list[OperatorSpec]:
    table = load_table(path)
    return [block.spec(i) for block in table.programs for i in range(len(block))]
