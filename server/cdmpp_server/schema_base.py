"""Base classes of the bodies of requests and answers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """Base of what clients send: unknown fields and values of another type are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class AnswerModel(BaseModel):
    """Base of what the service sends: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")
