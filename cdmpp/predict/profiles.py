"""Profiles of software: what it adds to its kernels, as a TOML file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from os import PathLike
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdmpp.devices.loading import toml_value
from cdmpp.errors import FieldError
from cdmpp.utils.writing import replacing

Seconds = Annotated[float, Field(strict=True, ge=0, le=10, allow_inf_nan=False)]
#: Most entries of a list or table of a profile.
MAX_ENTRIES = 64
CLOSED = ConfigDict(extra="forbid", frozen=True)


class Host(BaseModel):
    """Host time by kind, in seconds."""

    model_config = CLOSED

    #: Of a step: always, for each of its sequences, where several ranks share a layer, and where several replicas of
    #: the attention run their steps together.
    step_s: Seconds = 0.0
    sequence_s: Seconds = 0.0
    ranks_s: Seconds = 0.0
    replicas_s: Seconds = 0.0
    #: Of a prefill step whose graph leaves out recurrent and sparse layers, for each of them: the host launches their
    #: kernels.
    eager_layer_s: Seconds = 0.0
    #: Of a kernel outside of a graph, with bounds. The host runs ahead of the device: the longer of kernels and
    #: launches counts.
    launch_s: Seconds = 0.0
    launch_lower_s: Seconds = 0.0
    launch_upper_s: Seconds = 0.0
    #: Of a request, before the engine may schedule it: HTTP, tokenisation, queues between processes.
    frontend_s: Seconds = 0.0
    #: The host prepares the next step while the device computes: the longer of both counts, not their sum.
    overlapped: bool = False

    def step(self, sequences: int, ranks: int, replicas: int) -> float:
        """Seconds of a step, without launches."""
        together = self.ranks_s * (ranks > 1) + self.replicas_s * (replicas > 1)
        return self.step_s + self.sequence_s * sequences + together


class Profile(BaseModel):
    """What a program adds to its kernels."""

    model_config = CLOSED
    DOCUMENT: ClassVar[str]

    name: str = Field(min_length=1, max_length=100)
    #: Versions of the software that it stands for.
    versions: str = Field("", max_length=200)
    #: Measured over predicted time of the kernels.
    kernel_factor: float = Field(1.0, strict=True, ge=0.01, le=10, allow_inf_nan=False)
    host: Host = Host()
    #: Standard deviation of log(measured / predicted) that the profile leaves, besides the kernels' own interval.
    residual: float = Field(0.0, strict=True, ge=0, le=2, allow_inf_nan=False)
    #: Where each figure comes from.
    source: dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=2000)]] = {}

    @classmethod
    def of(cls, value: Mapping[str, Any], where: str) -> Self:
        """A profile from fields; ``where`` names their place in messages. Raises FieldError: a field is wrong."""
        for name, item in value.items():
            if isinstance(item, Collection) and not isinstance(item, str) and len(item) > MAX_ENTRIES:
                raise FieldError(
                    f"{where}: {str(name)[:40]}: {len(item):,} entries, at most {MAX_ENTRIES}",
                    path=f"engine.{str(name)[:40]}",
                    hint=f"{cls.DOCUMENT} has the fields",
                )
        try:
            return cls.model_validate(dict(value))
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, first["loc"]))
            raise FieldError(
                f"{where}: {path or 'engine'}: {first['msg']}",
                path=f"engine.{path}".rstrip("."),
                hint=f"{cls.DOCUMENT} has the fields",
            ) from None

    def to_toml(self) -> str:
        """The profile as the text of its file."""
        return "\n".join(_toml(self.model_dump(exclude_none=True))) + "\n"

    def write(self, path: str | PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        with replacing(path) as aside:
            aside.write_text(self.to_toml(), encoding="utf-8")


def _toml(fields: Mapping[str, Any], table: str = "") -> Iterator[str]:
    tables = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    for name, value in fields.items():
        if name not in tables:
            yield f"{toml_value(name) if table else name} = {toml_value(value)}"
    for name, inner in tables.items():
        yield f"\n[{table}{name}]"
        yield from _toml(inner, f"{table}{name}.")
