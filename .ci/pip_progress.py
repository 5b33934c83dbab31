"""Show what pip does in one line: ``pip install ... 2>&1 | python .ci/pip_progress.py``.

Messages that are no progress, errors above all, are printed as they are. On a terminal the line is updated in place;
elsewhere one line is printed for every 25 packages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TextIO

_PACKAGE = re.compile(r"(?:Collecting|Requirement already satisfied:|Processing \S*/|Obtaining \S*/)\s*(\w+)")
_PROGRESS = re.compile(
    r"Downloading|Using cached|Looking in|Installing|Getting requirements|Preparing|Building|Checking if|Created wheel"
    r"|Stored in|Saved|Attempting uninstall|Found existing|Uninstalling|Successfully (?:built|uninstalled)|\[notice\]"
)
#: pip's remark on a package index that the configuration names and this machine does not have.
_IGNORED = re.compile(r"WARNING: Location .* is ignored")


def show(lines: Iterable[str], out: TextIO) -> None:
    """Print the progress that lines of pip's output report."""
    packages, terminal, shown = set[str](), out.isatty(), False
    for line in lines:
        text = line.strip()
        package = _PACKAGE.match(text)
        if package:
            packages.add(package[1].lower())
        if text.startswith("Successfully installed "):
            line = text = f"installed {len(text.split()) - 2} packages"
        if package or _PROGRESS.match(text):
            if terminal:
                print(f"\r\033[K{len(packages)} packages: {text[:70]}", end="", file=out, flush=True)
                shown = True
            elif (package and len(packages) % 25 == 0) or text.startswith("Installing collected"):
                print(f"{len(packages)} packages: {text[:70]}", file=out, flush=True)
        elif text and not _IGNORED.match(text):
            print("\r\033[K" * shown + line.rstrip(), file=out, flush=True)
            shown = False
    if shown:
        print(file=out)


if __name__ == "__main__":
    show(sys.stdin, sys.stdout)
