"""The service against hostile input: ``python -m benchmarks.fuzz --cases 100000 [--seed 0] [--seconds S]``.

A real server in a process of its own, its caches small so that growth would show. Exit status 1 where an
answer was no answer: a 500, a hang, a figure that is none, a service that died. ``--again SEED`` sends one
case again (the seed that a finding names) and prints what comes back.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
from pathlib import Path

from benchmarks.fuzz import models, seeds
from benchmarks.fuzz.cases import MAX_RECORDS, OCTETS, SURFACES, FuzzRequest
from benchmarks.fuzz.drive import FuzzReport, FuzzRun
from benchmarks.serving.process import Served, running

#: Caches that fill within the first part of a run: what grows later is a leak.
SMALL = {"CDMPP_CACHE_BYTES": str(2**21), "CDMPP_ANSWER_CACHE_BYTES": str(2**21), "CDMPP_MAX_ADAPTED": "1"}


def main() -> int:
    """Run and print; 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--passes", type=int, default=1, help="the same cases again: what grows then leaks")
    parser.add_argument("--only", action="append", help="a surface's name; repeatable")
    parser.add_argument("--log", type=Path, help="where the service's log goes")
    parser.add_argument("--again", help="send the case of this seed once")
    options = parser.parse_args()
    with running(environment=SMALL, log=options.log) as served:
        if options.again:
            return again(served, options.again)
        _, document = served.ask("GET", "/openapi.json")
        known = [s for s in SURFACES if s.path in document["paths"] and (not options.only or s.name in options.only)]
        for surface in SURFACES:
            if surface.path not in document["paths"]:
                print(f"not tested: {surface.name}: this service has no {surface.path}")
        warm_up(served, with_tvm=any(surface.name == "TVMScript" for surface in known))
        failures = 0
        for _ in range(options.passes):
            run = FuzzRun(served, known, options.cases, options.seed, options.seconds, options.connections)
            show(run.run())
            failures += len(run.report.findings)
    return 1 if failures else 0


def warm_up(served: Served, with_tvm: bool) -> None:
    """Load what is loaded once, so that it is no growth: readers, TVM if asked for, the way to adapt."""
    programs = [{"tvmscript": seeds.SCRIPTS[0]}] if with_tvm else []
    programs += [{"tvm_json": json.dumps(document)} for document in seeds.tir_documents()]
    items = [{"program": program, "device": "intel-xeon-amx-2t-avx2"} for program in programs]
    served.ask("POST", "/predict", {"items": items})
    served.ask("POST", "/predict", seeds.predict_body(len(seeds.OPERATORS)))
    record = seeds.adapt_body()["records"][0]
    records = [{**record, "program": {**record["program"], "k": 8 * k}} for k in range(1, MAX_RECORDS + 1)]
    for k in (None, 1):  # choosing loads scikit-learn
        served.ask("POST", "/adapt", {"device": "t4", "records": records, "k": k})
    for model in models.examples():
        send(served, FuzzRequest("/models/predict?device=t4", OCTETS, model))


def send(served: Served, request: FuzzRequest) -> tuple[int, bytes]:
    """Status and body of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", request.path, request.body, {"Content-Type": request.media})
    response = connection.getresponse()
    return response.status, response.read()


def again(served: Served, seed: str) -> int:
    """One case, sent once more."""
    surface = next(s for s in SURFACES if s.name == seed.split(":")[1])
    request = surface.make(random.Random(seed))
    print(request.path, request.media, request.body[:3000])
    status, body = send(served, request)
    print(status, body[:3000])
    return 0


def show(report: FuzzReport) -> None:
    """The tables, and what was found."""
    print("| surface | cases | requests | slowest answer |\n| --- | ---: | ---: | ---: |")
    for name, cases in report.cases.items():
        print(f"| {name} | {cases:,} | {report.requests[name]:,} | {report.slowest_s[name]:.2f} s |")
    print(f"| all | {report.total():,} | {sum(report.requests.values()):,} | in {report.seconds:.0f} s |\n")
    print("statuses:", ", ".join(f"{status}: {n:,}" for status, n in sorted(report.statuses.items())))
    print("error codes:", ", ".join(f"{code}: {n:,}" for code, n in report.codes.most_common()))
    print("resident MB (service; with its reading workers):")
    print("  " + ", ".join(f"{s:.0%}: {a / 1e6:.0f}; {b / 1e6:.0f}" for s, a, b in report.resident))
    print(f"findings: {len(report.findings)}")
    for finding in report.findings[:40]:
        print(f"  {finding.surface} --again '{finding.seed}': {finding.what}")


if __name__ == "__main__":
    sys.exit(main())
