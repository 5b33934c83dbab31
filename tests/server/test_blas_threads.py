"""Matrix products while the service starts worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from tests.waiting import PATIENCE_S

pytest.importorskip("uvloop", reason="needs uvloop, which the service uses where it exists")

SCRIPT = textwrap.dedent("""
    import cdmpp_server
    import asyncio, threading
    import numpy, uvloop

    stop = threading.Event()

    def multiply():
        rows, centres = numpy.ones((256, 12)), numpy.ones((12, 1024))
        while not stop.is_set():
            rows @ centres

    async def start_processes():
        for _ in range(30):
            process = await asyncio.create_subprocess_exec("true")
            await process.wait()

    thread = threading.Thread(target=multiply)
    thread.start()
    uvloop.run(start_processes())
    stop.set()
    thread.join()
    print("ended")
    """)


def test_matrix_product_ends_while_processes_are_started() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "ended\n", done.stderr
