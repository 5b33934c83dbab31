"""Sizes and choices of the network, readable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH

#: none; sines as CDMPP's code computes them; sines with the standard exponent; an attention bias.
Positions = Literal["none", "published", "standard", "structural"]


class NetworkConfig(BaseModel):
    """Sizes of the network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(96, ge=16, le=512, description="width of a leaf token")
    layers: int = Field(2, ge=1, le=12)
    heads: int = Field(4, ge=1, le=16)
    feed_forward: int = Field(192, ge=16, le=4096)
    head_width: int = Field(384, ge=16, le=2048)
    head_layers: int = Field(3, ge=1, le=12)
    device_width: int = Field(16, ge=1, le=128, description="width of a known device's embedding")
    head: Literal["ratio", "structured"] = "ratio"
    dropout: float = Field(0.0, ge=0.0, le=0.9)
    positions: Positions = Field(
        "standard", description="how the leaves' places reach the network; see cdmpp.nn.positions"
    )
    device_inputs: Literal["ratio", "absolute"] = Field(
        "ratio", description="device numbers as ratios to the program's alone, or their logarithms as well"
    )
    schedule: bool = Field(False, description="read the schedule's columns of programs given as TIR")
    leaf_times: bool = Field(
        True, description="with schedule: the time of a program given as TIR is a sum over its leaves"
    )

    @property
    def leaf_width(self) -> int:
        """Columns of a leaf."""
        return WIDTH + SCHEDULE_WIDTH if self.schedule else WIDTH
