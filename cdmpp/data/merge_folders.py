"""Dataset folders of several machines as one."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from cdmpp.data.card import write_card
from cdmpp.data.folder import RECORDS, REPEATS, SPLITS, repeats_file
from cdmpp.data.load import load_table
from cdmpp.data.merge import concat
from cdmpp.data.records import write_records
from cdmpp.data.sealed import sealed_names
from cdmpp.data.split_file import make_splits, read_seal, write_splits
from cdmpp.errors import DataError


def merge_folders(
    folders: Sequence[str | PathLike[str]], out: str | PathLike[str], *, command: str = "", notes: Sequence[str] = ()
) -> Path:
    """Write the records and second measurements of dataset folders into a new folder, with a card.

    Networks that a folder seals stay sealed: the new folder gets splits by task and by device, and the sealed split.

    Parameters
    ----------
    folders : sequence of path
        In the order of the rows. A program that several folders have is stored once.
    out : path
        New or empty folder.
    command, notes
        See :func:`cdmpp.data.card.write_card`.

    Raises
    ------
    DataError
        A folder cannot be read, two of them contradict each other about a device or about the sealed networks, or
        ``out`` is not empty.
    """
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise DataError(f"{path} already exists and is not empty", hint="choose a new folder for --out")
    seals = {seal for folder in folders if (seal := read_seal(Path(folder) / SPLITS))[1]}
    if len(seals) > 1:
        named = "; ".join(sorted(", ".join(sealed_names(*seal)) for seal in seals))
        raise DataError(
            f"the folders seal different networks: {named}", hint="merge folders that seal the same networks"
        )
    records = concat([load_table(folder) for folder in folders])
    repeats = [load_table(found) for found in map(repeats_file, folders) if found is not None]
    path.mkdir(parents=True, exist_ok=True)
    # The seal first: a merge that is killed leaves no records without it.
    for stated, count in seals:
        write_splits(make_splits(records, sealed=count, sealed_from=stated), path / SPLITS)
    if repeats:
        write_records(concat(repeats), path / REPEATS)
    write_records(records, path / RECORDS)
    write_card(path, command=command, notes=notes)
    return path
