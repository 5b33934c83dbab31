"""Settings of the service: defaults < TOML file < environment (``CDMPP_...``) < arguments.

A variable that begins with CDMPP_ is a setting, belongs to another part, is set by Kubernetes, or is a mistake.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from cdmpp_server.database import check_database
from cdmpp_server.plan_limits import with_defaults

PREFIX = "CDMPP_"
#: Environment variable with the path of the optional TOML file.
FILE_VARIABLE = "CDMPP_SETTINGS_FILE"
#: Variables that are not settings: for the service's own processes, and for other parts of the product.
OTHERS = (FILE_VARIABLE, "CDMPP_WORKERS_FOLDER", "CDMPP_CACHE", "CDMPP_DEBUG", "CDMPP_PUBLIC_DATA", "CDMPP_API_KEY")

# Kubernetes describes each Service to each container by such variables; a Service may be named cdmpp or cdmpp-NAME.
_INJECTED = re.compile(r"CDMPP_(?:\w+_)?(?:SERVICE_(?:HOST|PORT\w*)|PORT_\d+_\w+)|CDMPP_(?:SERVICE|PORT)_\w+")
_ADDRESS = re.compile(r"CDMPP_(?:\w+_)?PORT")


def injected(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable for a Service, as CDMPP_PORT=tcp://10.0.0.1:8000."""
    name = name.upper()
    return bool(_INJECTED.fullmatch(name) or (_ADDRESS.fullmatch(name) and "://" in value))


def check_names(environment: Mapping[str, str], fields: Collection[str]) -> None:
    """Refuse variables that begin with CDMPP_ and that nothing reads, so that no misspelled setting is ignored.

    Raises ValueError: the message names each unknown variable with the nearest known one, and no value.
    """
    known = {*OTHERS, *(PREFIX + field.upper() for field in fields)}
    wrong = [
        name
        for name, value in environment.items()
        if name.upper().startswith(PREFIX) and name.upper() not in known and not injected(name, value)
    ]
    if wrong:
        raise ValueError(unknown("environment variable", wrong, known))


def unknown(what: str, names: Iterable[str], known: Iterable[str]) -> str:
    """A sentence for each name that is not known, with the nearest known one."""
    known = sorted(known)
    sentences = []
    for name in sorted(names):
        folded = {candidate.lower(): candidate for candidate in known}
        nearest = get_close_matches(name.lower(), folded, 1)
        mean = f": did you mean {folded[nearest[0]]}?" if nearest else "; docs/server.md lists the settings"
        sentences.append(f"the {what} {name[:100]} is no setting{mean}")
    return "; ".join(sentences)


#: "auto": text if stderr is a terminal, else JSON.
LogFormat = Literal["auto", "json", "text"]


def _named(value: object) -> object:
    """Convert a list of hashes to a mapping; the first 8 characters are the names."""
    if isinstance(value, list | tuple) and all(isinstance(hash, str) for hash in value):
        return {hash[:8]: hash for hash in value}
    return value


#: Mapping of key name (for logs) to SHA-256 of the key; settings may also give a list of hashes.
KeyHashes = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], Annotated[str, Field(pattern="^[0-9a-f]{64}$")]],
    BeforeValidator(_named),
]


def _parts(value: object) -> object:
    """Split a text at its commas."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


#: A name or address without a port, or a pattern of names.
HostName = Annotated[
    str, Field(pattern=r"^(\*|(\*\.)?[A-Za-z0-9._-]{1,253}|\[?[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]?)$")
]


class Settings(BaseSettings):
    """Settings of the service.

    Every field can be set by an environment variable (``CDMPP_`` and the name in capitals) or in the
    TOML file that ``CDMPP_SETTINGS_FILE`` names. An unknown ``CDMPP_`` variable and an unknown name in the
    file are refused: a misspelled setting would otherwise be ignored, and the service be open.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    #: Model folder. Default: the model in the package.
    model: Path | None = None
    #: Address on which ``python -m cdmpp_server`` listens. 127.0.0.1 accepts local connections only.
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    #: Names under which the service answers, in the environment separated by commas; ``*.example.com`` is every name
    #: below, ``*`` every name. Default: localhost, 127.0.0.1, ::1 and `host`; with 0.0.0.0 every address and the name
    #: of this machine.
    allowed_hosts: Annotated[tuple[HostName, ...], Field(min_length=1), NoDecode, BeforeValidator(_parts)] | None = None
    #: Number of server processes, each with its own model.
    workers: int = Field(1, ge=1, le=256)
    #: Maximum number of connections of a worker; a request on a further one is refused (503).
    max_connections: int = Field(2000, ge=1, le=1_000_000)
    #: Largest header of a request in bytes (431).
    max_header_bytes: int = Field(2**16, ge=1024, le=2**24)
    #: Time limit for the arrival of a request's header, also of the first one of a connection, in seconds.
    header_timeout_s: float = Field(10.0, gt=0, le=3600)
    #: Largest request body in bytes; a larger one is refused while it arrives. Parsing the worst body of this size (all
    #: commas) takes 40 times its length in memory.
    max_body_bytes: int = Field(16 * 2**20, ge=1024, le=2**31)
    #: Maximum number of items of one ``/predict`` request; part of the published schema.
    max_items: int = Field(10_000, ge=1, le=100_000)
    #: Time limit for the arrival of a request body, in seconds.
    body_timeout_s: float = Field(60.0, gt=0, le=3600)
    #: Time limit of a request from the arrival of its body, in seconds; a client may set a shorter one.
    deadline_s: float = Field(10.0, gt=0, le=3600)
    #: Maximum number of queries in one batch, over all requests.
    max_batch_rows: int = Field(256, ge=1, le=100_000)
    #: Maximum number of waiting queries; a request beyond it is refused (503).
    max_queued_rows: int = Field(20_000, ge=1, le=10_000_000)
    #: Time for which a small batch right after another waits for further queries, in seconds.
    max_wait_s: float = Field(0.001, ge=0, le=1)
    #: Maximum number of batches computed at a time.
    max_concurrent: int = Field(1, ge=1, le=64)
    #: Maximum number of waiting other requests; one beyond it is refused (503).
    max_queued: int = Field(64, ge=0, le=10_000)
    #: Memory of the cache of programs, in bytes.
    cache_bytes: int = Field(64 * 2**20, ge=0)
    #: Memory of the cache of predictions, in bytes.
    answer_cache_bytes: int = Field(64 * 2**20, ge=0)
    #: Maximum number of adapted models (``POST /adapt``); the least recently used is removed first.
    max_adapted: int = Field(16, ge=1, le=10_000)
    #: Folder that keeps adapted models over a restart. Default: they are kept in memory only.
    adapted_dir: Path | None = None
    #: Maximum number of processes that read TVM JSON, TVMScript and ONNX files; each starts when needed.
    sandbox_workers: int = Field(1, ge=1, le=64)
    #: Memory of such a process beyond its libraries, in bytes.
    sandbox_memory_bytes: int = Field(2 * 2**30, ge=64 * 2**20, le=2**40)
    #: Time limit for reading one program or model, in seconds, below `deadline_s`. A program that exceeds it is
    #: refused, and the process is replaced.
    sandbox_timeout_s: float = Field(5.0, gt=0, le=3600)
    #: Maximum number of processes that adapt a model (``POST /adapt``); each starts when needed.
    adapt_workers: int = Field(1, ge=1, le=64)
    #: Memory of such a process beyond its libraries, in bytes.
    adapt_memory_bytes: int = Field(2 * 2**30, ge=64 * 2**20, le=2**40)
    #: Start a job that proposes an adapted model when the predictions for a device have drifted.
    propose_models: bool = True
    #: Database of observations, registered programs and jobs: path of a SQLite file, or ``postgresql+psycopg://...``.
    #: Default: a file for this model in the user's state folder.
    database: Annotated[str | None, AfterValidator(check_database)] = None
    #: Maximum number and total size of registered programs; the least recently used is removed first.
    max_programs: int = Field(100_000, ge=1, le=10_000_000)
    max_program_bytes: int = Field(2**30, ge=2**20)
    #: Maximum number of stored observations, exceeded by 1 % for a while. Beyond it, the oldest of the key or address
    #: with most are removed.
    max_observations: int = Field(1_000_000, ge=1, le=1_000_000_000)
    #: Maximum number of observations that wait to be written; a request beyond it is refused (503).
    max_waiting_observations: int = Field(100_000, ge=1, le=10_000_000)
    #: Maximum number of processes for plans that are answered at once, ``/llm``, ``/training-step`` and ``/curve``;
    #: each starts when needed.
    plan_workers: int = Field(2, ge=1, le=64)
    #: Memory of a planning process beyond its libraries, in bytes; it applies to jobs too.
    plan_memory_bytes: int = Field(2 * 2**30, ge=64 * 2**20, le=2**40)
    #: Largest sizes of plan requests, by the names in :mod:`cdmpp_server.plan_limits` (``replay.nodes``, ``budget_s``);
    #: names that are not given keep their default. A larger request is refused (409).
    plan_limits: Annotated[dict[str, float], AfterValidator(with_defaults), Field(validate_default=True)] = {}
    #: Largest search budget that is answered at once, in seconds; a longer search becomes a job.
    max_inline_s: float = Field(1.0, ge=0, le=3600)
    #: Start the first planning process with the service instead of at the first request for a plan.
    warm_plans: bool = True
    #: Number of jobs that each worker runs at a time, each in its own process.
    job_workers: int = Field(1, ge=0, le=64)
    #: Maximum number of waiting and running jobs in a database.
    max_jobs: int = Field(1000, ge=1, le=100_000)
    #: Share of `max_jobs` that one key, or one address without a key, may have; at least one job.
    max_job_share: float = Field(0.25, gt=0, le=1)
    #: Maximum number of finished jobs in a database.
    max_kept_jobs: int = Field(1000, ge=1, le=1_000_000)
    #: Time for which a finished job is kept, in seconds.
    job_keep_s: float = Field(86_400.0, ge=1)
    #: SHA-256 of each accepted key, by a name for the log (``python -m cdmpp_server hash-key`` creates a key). Default:
    #: no key is needed.
    api_key_hashes: KeyHashes = {}
    #: The same for administrators' keys, which are accepted everywhere. Default: no administration.
    admin_key_hashes: KeyHashes = {}
    #: Whether ``/metrics`` is readable without a key.
    open_metrics: bool = True
    #: Rate limits of one key, or of one address without a key, in each worker; beyond them: 429.
    requests_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    items_per_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    #: "auto": text on a terminal, else JSON.
    log_format: LogFormat = "auto"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then environment, then the file; no ``.env`` and no secrets folder."""
        check_names(os.environ, settings_cls.model_fields)
        assert isinstance(env_settings, EnvSettingsSource)
        # Kubernetes sets CDMPP_PORT to an address if a Service has this name.
        env_settings.env_vars = {k: v for k, v in env_settings.env_vars.items() if not injected(k, v or "")}
        given = _from_file(settings_cls.model_fields)
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=given)


def _from_file(fields: Collection[str]) -> dict[str, Any]:
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return {}
    # A missing file is an error.
    with open(path, "rb") as file:
        given = tomllib.load(file)
    wrong = given.keys() - set(fields)
    if wrong:
        raise ValueError(f"{path}: {unknown('name', wrong, fields)}")
    return given
