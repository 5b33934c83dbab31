"""The request of a sweep: ``SWEEP.toml``."""

from __future__ import annotations

from collections.abc import Sized
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from cdmpp.errors import FieldError
from cdmpp.llm import defaults
from cdmpp.llm.engines import load_engine
from cdmpp.llm.layout import DTYPES, WEIGHTS
from cdmpp.plan.base.solve import read_request
from cdmpp.predict.requests.fields import Closed, Count, Name, PositiveSeconds
from cdmpp.utils.files import read_toml

#: Figures of a point that a sweep can minimise.
Objective = Literal[
    "price_per_million_tokens",
    "price_per_hour",
    "tpot_s",
    "ttft_s",
    "total_s",
    "gpus",
    "goodput_price_per_million_tokens",
]
#: A larger product is refused.
MAX_POINTS = 100_000
_HINT = "docs/tables.md describes sweeps"
_Price = Annotated[float, Field(gt=0, le=1e9)]
_Values = Annotated[list[Count], Field(min_length=1)]
_ONE: Any = Field(default=[defaults.DEGREE])


class Goals(Closed):
    """Limits that a point must keep; those left out do not limit.

    Attributes
    ----------
    ttft_s, tpot_s : float
        Seconds to the first token, and per further token.
    price_per_hour, price_per_million_tokens : float
        Price of all GPUs of a point, and of its output tokens.
    gpus : int
    figure : {"point", "upper"}
        Whether the predictions or their upper bounds must keep the limits of seconds.
    """

    ttft_s: PositiveSeconds | None = None
    tpot_s: PositiveSeconds | None = None
    price_per_hour: _Price | None = None
    price_per_million_tokens: _Price | None = None
    gpus: Count | None = None
    figure: Literal["point", "upper"] = "point"


class Load(Closed):
    """Requests that arrive one by one, for the largest rate that keeps the goals of latency.

    Attributes
    ----------
    share : float
        Share of the requests that keep them.
    count : int or None
        Requests of each simulation; None: as :func:`cdmpp.llm.goodput` chooses.
    """

    share: Annotated[float, Field(gt=0, le=1)] = defaults.SHARE
    count: Annotated[int, Field(ge=20, le=20_000)] | None = None


class Sweep(Closed):
    """A product of settings of one model.

    Attributes
    ----------
    config : str
        Path of the model's ``config.json``.
    devices : list of str
        Known devices or specifications (.toml, .json).
    tp, pp, ep, dp, batch : list of int
        An empty ``dp`` is ``max(1, ep // tp)`` (docs/llm.md).
    engines : list of str
        Engine profiles, by name or file (.toml); empty: the current one of ``framework``.
    input, output : int
        Tokens of a prompt and of an answer.
    precisions : list of str
        ``dtype``, or ``dtype/weights`` with quantised weights.
    price_per_gpu_hour : dict of str to float
        By device, in any currency.
    load : Load, optional
        Judges each point by requests that arrive one by one at its goodput, whatever its batch; the default of
        ``output`` is then that of :func:`cdmpp.llm.simulate`.
    objectives : list of str
        Two or more figures that the Pareto front minimises; the plot has the first two.
    """

    config: Annotated[str, Field(min_length=1, max_length=4096)]
    devices: Annotated[list[Name], Field(min_length=1)]
    price_per_gpu_hour: dict[str, _Price]
    tp: _Values = _ONE
    pp: _Values = _ONE
    ep: _Values = _ONE
    dp: list[Count] = Field(default=[])
    batch: _Values = Field(default=[defaults.BATCH])
    input: Count = defaults.INPUT
    output: Count = defaults.OUTPUT
    precisions: Annotated[list[Name], Field(min_length=1)] = Field(default=[defaults.DTYPE])
    kv_dtype: Name | None = None
    engines: list[Name] = Field(default=[])
    framework: Name | None = None
    cuda_graph: bool = defaults.CUDA_GRAPH
    goals: Goals = Goals()
    load: Load | None = None
    objectives: Annotated[list[Objective], Field(min_length=2)] = Field(default=["price_per_million_tokens", "tpot_s"])

    @model_validator(mode="before")
    @classmethod
    def _with_output(cls, value: Any) -> Any:
        """Requests under load have the default answer of a simulation."""
        loaded = isinstance(value, dict) and value.get("load") is not None
        return {"output": defaults.SERVED_OUTPUT, **value} if loaded else value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in self.devices:
            if name not in self.price_per_gpu_hour:
                raise PydanticCustomError("price", "price_per_gpu_hour has no price of {device}", {"device": name})
        for name in self.price_per_gpu_hour:
            if name not in self.devices:
                raise PydanticCustomError("price", "price_per_gpu_hour: {device} is not in devices", {"device": name})
        for field in ("devices", "tp", "pp", "ep", "dp", "batch", "precisions", "engines", "objectives"):
            values = getattr(self, field)
            if len(set(values)) < len(values):
                raise PydanticCustomError("repeated", "{field} repeats a value", {"field": field})
        for precision in self.precisions:
            dtype, slash, weights = precision.partition("/")
            if dtype not in DTYPES or (slash and weights not in WEIGHTS):
                message = "precisions: {precision} is not DTYPE or DTYPE/WEIGHTS (DTYPE: {dtypes}; WEIGHTS: {w})"
                known = {"precision": precision, "dtypes": ", ".join(DTYPES), "w": ", ".join(WEIGHTS)}
                raise PydanticCustomError("precision", message, known)
        if self.load is not None and self.goals.ttft_s is None and self.goals.tpot_s is None:
            raise PydanticCustomError("load", "load needs goals.ttft_s or goals.tpot_s")
        if self.load is None and "goodput_price_per_million_tokens" in self.objectives:
            raise PydanticCustomError("load", "objectives: goodput_price_per_million_tokens needs load")
        if self.size > MAX_POINTS:
            message = "the product has {size} points; at most {most} are evaluated"
            raise PydanticCustomError("too_large", message, {"size": self.size, "most": MAX_POINTS})
        return self

    @property
    def size(self) -> int:
        """Points of the product."""
        settings: tuple[Sized, ...] = (
            self.devices,
            self.tp,
            self.pp,
            self.ep,
            self.dp or (None,),
            self.batch,
            self.precisions,
            self.engines or (None,),
        )
        return prod(map(len, settings))


def read_sweep(path: Path) -> Sweep:
    """Read a sweep; the paths in it are relative to its folder.

    Raises
    ------
    DataError
        The file cannot be read, or is not TOML.
    FieldError
        A field is missing, unknown or wrong, or engine and framework contradict.
    """
    value = read_toml(path, _HINT)
    try:
        sweep = read_request(Sweep, value)
    except FieldError as error:
        raise FieldError(f"{path}: {error.message}", path=error.path, hint=_HINT) from None
    folder = path.absolute().parent

    def located(name: str) -> str:
        return str(folder / name) if name.lower().endswith((".json", ".toml")) else name

    prices = {located(name): price for name, price in sweep.price_per_gpu_hour.items()}
    devices = [located(name) for name in sweep.devices]
    engines = [located(name) for name in sweep.engines]
    for engine in engines or (None,):
        load_engine(engine, sweep.framework)
    return sweep.model_copy(
        update={
            "config": str(folder / sweep.config),
            "devices": devices,
            "price_per_gpu_hour": prices,
            "engines": engines,
        }
    )
