"""Library parts of a job: operators timed as PyTorch calls, in up to three protocols.

An item has ``operator`` (its fields), ``implementation`` and ``protocols``, and may have ``sdpa`` (a backend of
``scaled_dot_product_attention``). The implementation is one of

``library``
    One call of PyTorch (``library_calls``).
``composed``, ``compiled``
    A chain of calls as networks write it (``further_calls``), as it is or through ``torch.compile``.
``extra``
    An operator that cdmpp has no specification for yet (``further_calls``).

The result has seconds per run for each protocol in ``repeats_s``, and in ``failures`` why other protocols have none.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from .further_calls import make_composed, make_extra
from .library_calls import EVALUATORS, Call, CallError, Evaluate, Tensors, make_call, precision
from .run import KitError

#: A repeat lasts about this long; number of repeats; runs that take longer are run once.
_REPEAT_S, _REPEATS, _ONCE_S = 2e-3, 5, 0.1
_MAX_NUMBER = 10_000
#: Processes that compile before the measurement.
_MAX_COMPILERS = 8
_MESSAGE_LENGTH = 300
#: Folder from which the modules of this package are imported.
PROJECT = Path(__file__).resolve().parents[len((__package__ or "").split("."))]

Item = dict[str, Any]


class Kind:
    """Operators of a part; the methods are those that ``run.py`` calls.

    Parameters
    ----------
    part : Part
        Has ``items``.
    folder : Path
        Results and caches.
    """

    def __init__(self, part: Any, folder: Path) -> None:
        self._items: list[Item] = part.items
        self._folder = folder
        self._device = torch.device("cpu")
        self._stream: Any = None
        use_caches(folder)

    def prepare(self, deadline: float) -> None:
        """Compile items on several cores until ``deadline`` (``time.monotonic``); later calls continue."""
        done = {path.name for path in _marks(self._folder).glob("*")}
        items = [item for item in self._items if item["implementation"] == "compiled" and item["id"] not in done]
        if items:
            find_device()  # an error here is one message, not one of each process
        processes = []
        count = min(len(items), os.cpu_count() or 1, _MAX_COMPILERS)
        for number in range(count):
            share = self._folder / f"compile-{number}.json"
            share.write_text(json.dumps(items[number::count]), encoding="utf-8")
            environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            processes.append(subprocess.Popen(module_command(__name__, share), cwd=PROJECT, env=environment))
        try:
            for process in processes:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass  # what is not compiled yet is compiled when it is measured
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def open(self) -> dict[str, Any]:
        """Prepare PyTorch in the process that measures."""
        self._device = find_device()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return device_facts(self._device)

    def measure(self, item: Item) -> dict[str, Any]:
        """Time one operator in the protocols of the item."""
        repeats: dict[str, list[float]] = {}
        failures: dict[str, str] = {}
        failure = ""
        try:
            with self._settings(item):
                self._time(item, repeats, failures)
        except Exception as error:
            failure = error_line(error)
        if not repeats and not failure:
            failure = "; ".join(f"{protocol}: {text}" for protocol, text in failures.items())
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # raises after a fault that this process cannot recover from
            torch.cuda.empty_cache()
        return {"repeats_s": repeats, "failures": failures, "failure": failure}

    def _time(self, item: Item, repeats: dict[str, list[float]], failures: dict[str, str]) -> None:
        """Time the operator; its tensors are freed on return."""
        call = operator_call(item, self._device)
        call()  # the first call selects a kernel and allocates workspaces, which is not timed
        for protocol in item["protocols"]:
            try:
                repeats[protocol] = time_call(EVALUATORS[protocol](call, self._device))
            except Exception as error:
                failures[protocol] = error_line(error)

    @contextmanager
    def _settings(self, item: Item) -> Iterator[None]:
        operator = item["operator"]
        with ExitStack() as stack:
            if operator["operator"] == "backward":
                stack.enter_context(torch.enable_grad())
            else:
                # Compiled functions are specialised to inference mode, which not every version supports.
                quiet = torch.no_grad if item["implementation"] == "compiled" else torch.inference_mode
                stack.enter_context(quiet())
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            stack.enter_context(precision({"dtype": operator.get("dtype", "float32")}))
            if item.get("sdpa"):
                from torch.nn.attention import SDPBackend, sdpa_kernel

                stack.enter_context(sdpa_kernel(getattr(SDPBackend, item["sdpa"])))
            yield


def find_device() -> torch.device:
    """Return the first CUDA device.

    Raises
    ------
    KitError
        PyTorch finds no CUDA device.
    """
    if not torch.cuda.is_available():
        raise KitError(
            f"PyTorch {torch.__version__} finds no CUDA device: check the driver and that PyTorch is built for CUDA"
        )
    return torch.device("cuda", 0)


def device_facts(device: torch.device) -> dict[str, Any]:
    """Describe a CUDA device for the result file."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "compute_capability": list(torch.cuda.get_device_capability(device)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def module_command(module: str, argument: Path) -> list[str]:
    """Return the command that runs a module of this folder, in :data:`PROJECT`, with a path as its argument."""
    return [sys.executable, "-m", module, str(argument.resolve())]


def operator_call(item: Item, device: torch.device) -> Call:
    """Allocate the inputs of an item's operator and return its call.

    Raises
    ------
    CallError
        PyTorch has no such call, or the implementation is unknown.
    """
    operator, implementation = item["operator"], item["implementation"]
    tensors = Tensors(device, gradients=operator["operator"] == "backward")
    if implementation == "library":
        return make_call(operator, tensors)
    if implementation == "extra":
        return make_extra(operator, tensors)
    function, arguments = make_composed(operator, tensors)
    if implementation == "compiled":
        torch._dynamo.reset()
        function = torch.compile(function, dynamic=False)
    elif implementation != "composed":
        raise CallError(f"unknown implementation {implementation!r}: library, composed, compiled or extra")
    return lambda: function(*arguments)


def time_call(evaluate: Evaluate) -> list[float]:
    """Return seconds per run, one value per repeat.

    A repeat is as many runs as take :data:`_REPEAT_S`. A call that takes longer than :data:`_ONCE_S` is run once.
    """
    first = float(evaluate(1, 1)[0])
    if first > _ONCE_S:
        return [first]
    warm = float(evaluate(max(1, min(_MAX_NUMBER, int(_REPEAT_S / first / 8))), 1)[0])
    number = min(_MAX_NUMBER, max(1, math.ceil(_REPEAT_S / min(first, warm))))
    return [float(value) for value in evaluate(number, _REPEATS)]


def use_caches(folder: Path) -> None:
    """Keep compiled functions in ``folder``, so that a later process finds them."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")


def _marks(folder: Path) -> Path:
    """Folder with an empty file for each item whose compilation has ended."""
    return folder / "compiled"


def error_line(error: Exception) -> str:
    """Return the first line of an error, shortened."""
    return ((str(error).strip() or type(error).__name__).splitlines()[0])[:_MESSAGE_LENGTH]


def compile_share(share: Path) -> None:
    """Compile the items of a file; used by processes of :meth:`Kind.prepare`."""
    use_caches(share.parent)
    device, marks = find_device(), _marks(share.parent)
    marks.mkdir(exist_ok=True)
    for item in json.loads(share.read_text(encoding="utf-8")):
        try:
            with torch.no_grad():
                operator_call(item, device)()
        except Exception as error:  # the measurement records it as the item's failure
            print(f"{item['id']} does not compile: {error_line(error)}", file=sys.stderr)
        (marks / item["id"]).touch()


if __name__ == "__main__":
    compile_share(Path(sys.argv[1]))
