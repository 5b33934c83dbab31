"""Settings of the service: defaults < TOML file < environment (``CDMPP_...``) < arguments."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from cdmpp_server.observe.tables import check_database
from cdmpp_server.operate.access import KeyHashes
from cdmpp_server.operate.logs import LogFormat

#: Environment variable that names the optional TOML file.
FILE_VARIABLE = "CDMPP_SETTINGS_FILE"


class Settings(BaseSettings):
    """What an operator of the service can choose.

    Every field can be set by an environment variable (``CDMPP_`` and the name in capitals) or in the
    TOML file that ``CDMPP_SETTINGS_FILE`` names.

    Parameters
    ----------
    model : Path, optional
        Model folder; the one that ships with the package where none is given.
    host, port
        Where ``python -m cdmpp_server`` listens. 127.0.0.1: nobody else reaches it unless told so.
    workers : int
        Processes that answer, each with a model of its own.
    max_body_bytes : int
        Larger request bodies are refused while they arrive. The worst body of this size (all commas)
        takes 40 times its length to parse.
    max_items : int
        Items of one ``/predict`` request; part of the published schema.
    body_timeout_s : float
        A request body must have arrived within this time.
    deadline_s : float
        A request is answered or refused within this time from when its body has arrived; a client may ask
        for less.
    max_batch_rows : int
        Queries of all requests that are computed together.
    max_queued_rows : int
        Queries that may wait; a request that would make them more is told to come back (503).
    max_wait_s : float
        How long a small batch right behind another waits for company.
    max_concurrent : int
        Batches, and apart from them other requests (``/adapt``), computed at a time.
    max_queued : int
        Such other requests that may wait for a place; one more is told to come back (503).
    cache_bytes : int
        Memory for programs seen before.
    answer_cache_bytes : int
        Memory for answers given before.
    max_adapted : int
        Adapted models (``POST /adapt``) that are kept; the least recently used is forgotten first.
    adapted_dir : Path, optional
        Folder in which they outlive the process; only in memory where none is given.
    sandbox_workers : int
        Processes that read TVM JSON, TVMScript and ONNX files; each starts when it is first needed.
    sandbox_memory_bytes : int
        Memory of such a process for what it reads, beyond its libraries.
    sandbox_timeout_s : float
        Time to read one program or model, less than `deadline_s`; then the process is replaced and the
        program refused.
    database : str, optional
        Where observations and registered programs are kept: path of a SQLite file, or
        ``postgresql+psycopg://...``. Without one: cdmpp/service.sqlite in the user's state folder.
    max_programs, max_program_bytes : int
        Registered programs that are kept; the least recently used is dropped first.
    max_waiting_observations : int
        Observations that may wait to be written; more are told to come back (503).
    plan_workers : int
        Processes that make plans which are answered at once; another starts when those are busy.
    plan_memory_bytes : int
        Memory of a planning process, also of one that does jobs, beyond its libraries.
    max_inline_s : float
        Searches with a larger budget become jobs.
    warm_plans : bool
        Start the first planning process with the service, not with the first request for a plan.
    job_workers : int
        Jobs that each worker of the service does at a time, in a process each.
    max_jobs, max_kept_jobs : int
        Jobs of a database that may wait or run; finished ones that are kept.
    job_keep_s : float
        How long a finished job is kept.
    api_key_hashes : mapping of str to str, or list of str
        SHA-256 of each key that may ask, by a name for the log (``python -m cdmpp_server hash-key`` makes one).
        Without any, everybody may.
    admin_key_hashes : the same
        Keys that may administer (and ask). Without any, there is no administration.
    open_metrics : bool
        Whether ``/metrics`` needs no key.
    requests_per_s, items_per_s : float, optional
        How much one key, or one address without a key, may ask of each worker; 429 beyond.
    log_format : {"auto", "json", "text"}
        "auto": text on a terminal, JSON elsewhere.
    """

    model_config = SettingsConfigDict(env_prefix="CDMPP_", frozen=True, extra="forbid")

    model: Path | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31)] = 16 * 2**20
    max_items: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    body_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    max_batch_rows: Annotated[int, Field(ge=1, le=100_000)] = 256
    max_queued_rows: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    max_wait_s: Annotated[float, Field(ge=0, le=1)] = 0.001
    max_concurrent: Annotated[int, Field(ge=1, le=64)] = 1
    max_queued: Annotated[int, Field(ge=0, le=10_000)] = 64
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    answer_cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    max_adapted: Annotated[int, Field(ge=1, le=10_000)] = 16
    adapted_dir: Path | None = None
    sandbox_workers: Annotated[int, Field(ge=1, le=64)] = 1
    sandbox_memory_bytes: Annotated[int, Field(ge=64 * 2**20, le=2**40)] = 2 * 2**30
    sandbox_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    database: Annotated[str | None, AfterValidator(check_database)] = None
    max_programs: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    max_program_bytes: Annotated[int, Field(ge=2**20)] = 2**30
    max_waiting_observations: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    plan_workers: Annotated[int, Field(ge=1, le=64)] = 2
    plan_memory_bytes: Annotated[int, Field(ge=64 * 2**20, le=2**40)] = 2 * 2**30
    max_inline_s: Annotated[float, Field(ge=0, le=3600)] = 1.0
    warm_plans: bool = True
    job_workers: Annotated[int, Field(ge=0, le=64)] = 1
    max_jobs: Annotated[int, Field(ge=1, le=100_000)] = 1000
    max_kept_jobs: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    job_keep_s: Annotated[float, Field(ge=1)] = 86_400.0
    api_key_hashes: KeyHashes = {}
    admin_key_hashes: KeyHashes = {}
    open_metrics: bool = True
    requests_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    items_per_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
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
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=_from_file())


def _from_file() -> dict[str, Any]:
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return {}
    # A file that was named but is not there is an error, not an empty file.
    with open(path, "rb") as file:
        return tomllib.load(file)
