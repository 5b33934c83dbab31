"""Run the commands and Python examples of README.md and docs/*.md, and write what they print.

>>> python -m tests.printed_outputs [--check] [FILES]        # doctest: +SKIP

A printed output is one of two things, of which a page may show some lines in the middle only:

- in a block with lines that begin with ``$ ``: what follows each command, to the next command;
- a block without language, or of ``text``, right behind a block of one command or of Python.

Commands run in a copy of ``docs/examples`` and ``examples`` on one thread. Python blocks of a page share their
variables. ``cat FILE`` makes a file that is not there from what the page shows. A line ``...`` stands for lines left
out. A comment ``<!-- not run: REASON -->`` in front of a block leaves it alone. The output of a command that fails is
not written, unless the page shows an error. Outputs are compared and written only where they differ: seconds of a
search, temporary files and the identity of the model (:data:`VOLATILE`) are not compared; other numbers may differ by
0.2 %, because last digits depend on the processor.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
_BLOCK = re.compile(
    r"^(?P<mark><!-- not run: [^\n]*-->\n+)?```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
_COMMAND = re.compile(r"\$ (?:.*\\\n)*.*\n")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
#: Seconds of a search, temporary files, the identity of the model.
VOLATILE = re.compile(r"[\d.]+ m?s of search|in [\d.]+ m?s\b|after [\d.]+ m?s\b|/tmp/\S+|base-[0-9a-f]{12}")
TOLERANCE = 0.002


def same(shown: str, printed: str) -> bool:
    """Whether an output agrees with the one shown, lines left out and volatile figures aside."""
    shown, printed = (VOLATILE.sub("#", text) for text in (shown, printed))
    words = [re.sub(r"\s+|-{3,}", " ", _NUMBER.sub("#", text)).strip() for text in (shown, printed)]
    numbers = [[float(n.replace(",", "")) for n in _NUMBER.findall(text)] for text in (shown, printed)]
    close = (abs(a - b) <= max(TOLERANCE * abs(a), 0) for a, b in zip(*numbers, strict=False))
    return words[0] == words[1] and len(numbers[0]) == len(numbers[1]) and all(close)


def abridged(printed: str, shown: str) -> str:
    """The output with as many lines left out as where the page shows ``...``."""
    everything = printed.splitlines(keepends=True)
    if shown.splitlines(keepends=True)[:1] != everything[:1] and shown.partition("\n")[0] + "\n" in everything:
        first, count = everything.index(shown.partition("\n")[0] + "\n"), len(shown.splitlines())
        return "".join(everything[first : first + count])
    before, dots, after = shown.partition("\n...\n")
    if not dots:
        return printed
    lines, head, tail = printed.splitlines(keepends=True), before.count("\n") + 1, after.count("\n")
    return "".join([*lines[:head], "...\n", *lines[len(lines) - tail :]]) if head + tail < len(lines) else printed


class CommandError(Exception):
    """A command of a page failed."""


class Runner:
    """Runs the blocks of one page in a folder with the examples."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, ""
        for name in ("examples", "docs/examples"):
            shutil.copytree(ROOT / name, folder / name)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("CDMPP_")}
        threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "160", "NO_COLOR": "1"}
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'server'}:{folder}", "CDMPP_CACHE": str(folder / "cache")}
        self.environment = inherited | threads | here | paths

    def command(self, text: str, shown: str) -> str:
        """Output of a shell command with its errors."""
        name = text.removeprefix("cat ").strip()
        if text.startswith("cat ") and not (self.folder / name).exists():
            (self.folder / name).write_text(shown, encoding="utf-8")
        names = f'cdmpp() {{ {sys.executable} -m cdmpp "$@"; }}\npython() {{ {sys.executable} "$@"; }}\n'
        return self._run(["bash", "-c", f"{names}exec 2>&1\n{text}"], "error:" in shown)

    def python(self, code: str) -> str:
        """Output of a block of Python behind those before it on the page, which print nothing again."""
        quiet = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    exec(BEFORE, globals())\n"
        script = f"BEFORE = {self.code!r}\n{quiet}{code}"
        self.code += code
        return self._run([sys.executable, "-c", script], False)

    def _run(self, command: list[str], fails: bool) -> str:
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": 600}
        done = subprocess.run(command, cwd=self.folder, env=self.environment, **output)
        printed = done.stdout.decode().replace(str(self.folder), "/tmp/folder")
        if done.returncode and not fails:
            raise CommandError(f"ended with status {done.returncode}:\n{printed}")
        return printed


def outputs(text: str) -> Iterator[tuple[int, int, str, bool]]:
    """Start and end of each printed output of a page, its command, and whether that is Python."""
    blocks = list(_BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=False):
        body, kind = block["body"], block["kind"]
        if block["mark"]:
            continue
        commands = list(_COMMAND.finditer(body)) if body.startswith("$ ") else []
        commands = commands if kind in ("", "console") else []
        for command, following in zip(commands, [*commands[1:], None], strict=False):
            start, end = command.end(), following.start() if following else len(body)
            yield block.start("body") + start, block.start("body") + end, command[0][2:], False
        adjacent = after is not None and after["kind"] in ("", "text") and not after["mark"]
        adjacent = adjacent and not text[block.end() : after.start()].strip()
        adjacent = adjacent and not after["body"].startswith(("$ ", "cdmpp "))
        if adjacent and (kind == "python" or (kind == "" and body.startswith("cdmpp ") and body.count("\n") == 1)):
            yield after.start("body"), after.end("body"), body, kind == "python"


def regenerate(page: str, check: bool) -> tuple[list[str], bool]:
    """Write the outputs of a page, or only compare.

    Returns the differences, and whether a command failed: its output is never written.
    """
    path, parts, last, changed, failed = ROOT / page, list[str](), 0, list[str](), False
    text = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder))
        for start, end, command, is_python in outputs(text):
            shown = text[start:end]
            try:
                printed = runner.python(command) if is_python else runner.command(command, shown)
            except CommandError as error:
                changed.append(f"{page}: {command.strip()}\n{error}")
                failed = True
                continue
            printed = abridged("\n".join(line.rstrip() for line in printed.strip("\n").splitlines()) + "\n", shown)
            printed += "\n" * (len(shown) - len(shown.rstrip("\n")) - 1)
            if shown and not same(shown, printed):
                changed.append(f"{page}: {command.strip()}\n--- shown\n{shown}--- printed\n{printed}")
                parts += [text[last:start], printed]
                last = end
    if parts and not check:
        path.write_text("".join([*parts, text[last:]]), encoding="utf-8")
    return changed, failed


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.printed_outputs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare; change nothing")
    parser.add_argument("pages", nargs="*", default=PAGES)
    options = parser.parse_args()
    results = [regenerate(page, options.check) for page in options.pages]
    changed = [difference for differences, _ in results for difference in differences]
    print("\n".join(changed) or "every printed output is up to date")
    return int(any(failed for _, failed in results) or (options.check and bool(changed)))


if __name__ == "__main__":
    sys.exit(main())
