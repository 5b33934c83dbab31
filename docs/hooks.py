"""MkDocs hooks: links to files of the repository outside ``docs/`` become their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[\w./-]+)(#[\w-]+)?\)")
_DOCS = Path(__file__).resolve().parent
_PLAIN = frozenset({".py", ".json"})


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace a link that leaves the site by its text and the path in the repository."""

    def replaced(match: re.Match[str]) -> str:
        target = (_DOCS / page.file.src_path).parent.joinpath(match[2]).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_path} links to {match[2]}, which does not exist")
        if target.is_relative_to(_DOCS) and target.suffix not in _PLAIN:
            return match[0]
        return f"{match[1]} (`{target.relative_to(_DOCS.parent)}`)"

    return _LINK.sub(replaced, markdown)
