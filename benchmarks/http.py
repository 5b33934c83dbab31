"""Items a second of ``POST /predict`` over HTTP: one process, one client, one connection.

``python -m benchmarks.http [--items 256] [--requests 200]``: starts the service, asks once (cold), then
again and again for the same operator items (warm), and prints the rates.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import time

from cdmpp.demo import running_server


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=256)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    items = [
        {
            "program": {"operator": "linear", "m": 64 * i, "n": 4096, "k": 1024, "dtype": "float16"},
            "device": "t4",
        }
        for i in range(1, options.items + 1)
    ]
    body = json.dumps({"items": items})
    with running_server() as server:
        model = server.request("GET", "/readyz")["model_id"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        seconds = [ask(connection, body, options.items) for _ in range(options.requests + 1)]
        connection.close()
    cold, warm = seconds[0], sorted(seconds[1:])
    print(f"{model}, {options.items} operator items a request, {os.cpu_count()} cores\n")
    print("| cache | ms a request | items a second |\n| --- | ---: | ---: |")
    for name, value in (
        ("cold (first request)", cold),
        ("warm, median", warm[len(warm) // 2]),
        ("warm, 99th percentile", warm[min(len(warm) - 1, int(0.99 * len(warm)))]),
    ):
        print(f"| {name} | {1e3 * value:.1f} | {options.items / value:,.0f} |")


def ask(connection: http.client.HTTPConnection, body: str, count: int) -> float:
    """Seconds of one request, until its answer is read; every item must have a latency."""
    start = time.perf_counter()
    connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
    answer = connection.getresponse().read()
    elapsed = time.perf_counter() - start
    if sum("latency_s" in result for result in json.loads(answer)["results"]) != count:
        raise SystemExit("an item was not predicted")
    return elapsed


if __name__ == "__main__":
    main()
