"""Repeated runs of test files on busy processors: ``python -m tests.stress [--rounds N] [FILE ...]``.

A test must not depend on how busy the machine is. Busy loops, six per processor, compete with the tests. Without
FILE two groups run: the files that failed under load before (20 rounds), and all files that start processes, sleep
or read a clock (5 rounds). Prints the passes of each file; the exit status is 1 if any run failed.
"""

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: These failed on busy processors before, or wait for other processes throughout.
_SERVER = ("jobs", "jobs_process", "reload", "plans", "process", "sandbox", "batcher", "limits", "logs")
FRAGILE = (
    *(f"tests/server/test_{name}.py" for name in _SERVER),
    *(f"tests/data/measure/test_{name}.py" for name in ("collect", "pools", "remote")),
)
FRAGILE_ROUNDS, OTHER_ROUNDS = 20, 5
#: A busy machine takes much longer than the limit of an ordinary run allows.
TEST_TIMEOUT_S = 3600
_TIMED = re.compile(r"sleep\(|time\.(monotonic|time|perf_counter)|subprocess|multiprocessing|running(_server)?\(")


def timed_files() -> list[str]:
    """Test files that start processes, sleep or read a clock."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if _TIMED.search(file.read_text())]


def spin() -> None:
    """Occupy a processor until killed."""
    while True:
        pass


def passes(file: str, run: int) -> bool:
    """Run one test file; print what pytest printed if a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-q", f"--timeout={TEST_TIMEOUT_S}", f"--basetemp={folder}/t", file]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    if done.returncode != 0:
        print(f"{file}, run {run}: failed\n{done.stdout[-8000:]}", flush=True)
    return done.returncode == 0


def stress(plan: Sequence[tuple[str, int]], at_once: int) -> bool:
    """Run each file as often as the plan says; return whether all runs passed."""
    passed = dict.fromkeys((file for file, _ in plan), 0)
    runs = [(file, run) for run in range(max(n for _, n in plan)) for file, rounds in plan if run < rounds]
    with ThreadPoolExecutor(at_once) as pool:
        results = pool.map(lambda job: (job[0], passes(*job)), runs)
        for count, (file, good) in enumerate(results, 1):
            passed[file] += good
            print(f"{count} of {len(runs)} runs: {file} {'passed' if good else 'FAILED'}", flush=True)
    print()
    for file, rounds in plan:
        print(f"{passed[file]:3} of {rounds:3} runs passed  {file}")
    return sum(passed.values()) == len(runs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE", help="test files; default: both groups")
    parser.add_argument("--rounds", type=int, help="runs of each file; default: 20 and 5")
    parser.add_argument("--loops", type=int, default=6 * cores, help="busy loops; default: %(default)s")
    parser.add_argument("--at-once", type=int, default=cores, help="files tested at a time; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.files:
        plan = [(file, options.rounds or FRAGILE_ROUNDS) for file in options.files]
    else:
        others = [file for file in timed_files() if file not in FRAGILE]
        plan = [(file, options.rounds or FRAGILE_ROUNDS) for file in FRAGILE]
        plan += [(file, options.rounds or OTHER_ROUNDS) for file in others]
    print(f"{options.loops} busy loops on {cores} processors, {options.at_once} files at a time", flush=True)
    loops = [multiprocessing.Process(target=spin, daemon=True) for _ in range(options.loops)]
    for loop in loops:
        loop.start()
    try:
        return 0 if stress(plan, options.at_once) else 1
    finally:
        for loop in loops:
            loop.kill()


if __name__ == "__main__":
    sys.exit(main())
