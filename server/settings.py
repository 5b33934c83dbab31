"""Settings of the service: defaults < TOML file < environment (``CDMPP_...``) < arguments."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

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
        Where ``python -m server`` listens. 127.0.0.1: nobody else reaches it unless told so.
    max_body_bytes : int
        Larger request bodies are refused while they arrive. The worst body of this size (all commas)
        takes 40 times its length to parse.
    max_items : int
        Items of one ``/predict`` request; part of the published schema.
    body_timeout_s : float
        A request body must have arrived within this time.
    max_concurrent : int
        Requests computed at a time.
    max_queued : int
        Requests that may wait for a place; one more is told to come back (503).
    cache_bytes : int
        Memory for programs seen before.
    max_adapted : int
        Adapted models (``POST /adapt``) that are kept; the least recently used is forgotten first.
    adapted_dir : Path, optional
        Folder in which they outlive the process; only in memory where none is given.
    """

    model_config = SettingsConfigDict(env_prefix="CDMPP_", frozen=True, extra="forbid")

    model: Path | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    max_body_bytes: Annotated[int, Field(ge=1024, le=2**31)] = 16 * 2**20
    max_items: Annotated[int, Field(ge=1, le=100_000)] = 10_000
    body_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    max_concurrent: Annotated[int, Field(ge=1, le=64)] = 2
    max_queued: Annotated[int, Field(ge=0, le=10_000)] = 64
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 2**20
    max_adapted: Annotated[int, Field(ge=1, le=10_000)] = 16
    adapted_dir: Path | None = None

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
