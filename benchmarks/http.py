"""Items a second of ``/predict`` over HTTP: the real server in a process of its own, a warm cache.

``python -m benchmarks.http [--model DIR] [--repeats 40]``: one client sends requests of 256 operator items
one after the other; the first request is reported apart as the cold one.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

ITEMS = 256
DEVICES = ("t4", "l4", "a100-pcie-40gb", "h100-sxm5-80gb")


def items() -> list[dict[str, Any]]:
    """256 different questions: four operators in sixteen sizes on four devices."""
    found: list[dict[str, Any]] = []
    for i in range(ITEMS):
        size = 64 * (i // 16 + 1)
        program = (
            {"operator": "linear", "m": size, "n": 4096, "k": 1024, "dtype": "float16"},
            {"operator": "softmax", "rows": size, "cols": 1024},
            {"operator": "add", "rows": size, "cols": 4096},
            {"operator": "attention_encoder", "batch": 1, "q_len": size, "heads": 16, "kv_heads": 4,
             "head_dim": 64},
        )[i % 4]  # fmt: skip
        found.append({"id": str(i), "program": program, "device": DEVICES[i // 4 % 4]})
    return found


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def running_server(model: str | None) -> Iterator[int]:
    """The server in a process of its own; yields its port once it is ready."""
    port = free_port()
    command = [sys.executable, "-m", "server", "--port", str(port), *(["--model", model] if model else [])]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=os.environ) as process:
        try:
            deadline = time.monotonic() + 120
            while ask(port, "GET", "/readyz") is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server did not get ready: {' '.join(command)}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()


def ask(port: int, method: str, path: str) -> bytes | None:
    """The body of a 200, or None."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except OSError:
        return None
    finally:
        connection.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    body = json.dumps({"items": items(), "quantiles": [0.1, 0.9]}).encode()
    headers = {"Content-Type": "application/json"}
    with running_server(options.model) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        seconds = []
        for _ in range(options.repeats + 1):
            started = time.perf_counter()
            connection.request("POST", "/predict", body, headers)
            response = connection.getresponse()
            answer = response.read()
            seconds.append(time.perf_counter() - started)
            results = json.loads(answer).get("results", [])
            if response.status != 200 or len(results) != ITEMS or any("error" in r for r in results):
                raise SystemExit(f"status {response.status}: {answer[:300]!r}")
    warm = sorted(seconds[1:])
    median, last = statistics.median(warm), warm[int(0.99 * len(warm))]
    print(f"| /predict, {ITEMS} operator items a request | items/s | ms a request |\n| --- | ---: | ---: |")
    print(f"| first request | {ITEMS / seconds[0]:,.0f} | {1e3 * seconds[0]:.1f} |")
    print(f"| warm, median of {len(warm)} | **{ITEMS / median:,.0f}** | {1e3 * median:.1f} |")
    print(f"| warm, 99th percentile | {ITEMS / last:,.0f} | {1e3 * last:.1f} |")


if __name__ == "__main__":
    main()
