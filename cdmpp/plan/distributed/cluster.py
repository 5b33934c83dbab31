"""Connection to Ray: a local instance for one command, or a cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cdmpp.errors import MissingDependencyError, ServiceError, install_hint

#: Address of an instance of Ray on this machine that ends with the command.
LOCAL = "local"
#: Ray reads these when it is imported or started; a value of the caller stays.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no statistics are sent
    "RAY_DATA_LOG_LEVEL": "ERROR",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default, without a warning
}


@contextmanager
def ray_cluster(address: str | None = None, processors: int | None = None) -> Iterator[Any]:
    """The module ``ray``, connected; in the end the connection is closed and a local instance is stopped.

    A program that has called ``ray.init`` itself keeps its own connection.

    Parameters
    ----------
    address : str, optional
        ``HOST:PORT`` or ``auto``. Default: ``RAY_ADDRESS`` where it is set, else an instance on
        this machine.
    processors : int, optional
        Processors that an instance on this machine uses; default: all.

    Raises
    ------
    MissingDependencyError
        Ray is not installed.
    ServiceError
        There is no cluster at the address.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise MissingDependencyError("--ray needs the package ray", hint=install_hint("ray")) from None
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    options: dict[str, Any] = {"include_dashboard": False, "num_cpus": processors} if address == LOCAL else {}
    try:
        with _silent_stderr():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ServiceError(
            f"no Ray cluster at {address}: {_first_line(error)}",
            hint="start one with: ray start --head; a cluster with tokens needs RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN; without an address this machine is used",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def cores(ray: Any) -> int:
    """Processors of the cluster, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hide the standard error of this process: Ray's C++ part reports its log level there. Errors are exceptions."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
