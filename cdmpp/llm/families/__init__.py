"""Architectures: how the configuration of each ``model_type`` becomes a description of layers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from cdmpp.llm.config import LLMConfig
from cdmpp.llm.families.classic import CLASSIC
from cdmpp.llm.families.fields import Fields
from cdmpp.llm.families.mixed import MIXED
from cdmpp.llm.families.recurrent import RECURRENT
from cdmpp.llm.families.sparse import SPARSE

#: ``model_type`` -> how its configuration is read.
FAMILIES: dict[str, Callable[[Fields], LLMConfig]] = {**CLASSIC, **MIXED, **SPARSE, **RECURRENT}
_CLASS = re.compile(r"(Sparse)?(ForCausalLM|LMHeadModel|ForConditionalGeneration|For\w+|Model)$")


def architecture_family(name: str) -> str | None:
    """The ``model_type`` of a class such as ``LlamaForCausalLM``; None where no family has that name."""
    plain = _CLASS.sub("", name).casefold()
    return next((family for family in FAMILIES if re.sub("[_-]", "", family) == plain), None)


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    text = files(__name__).joinpath("defaults.json").read_text(encoding="utf-8")
    return {name: fields for names, fields in json.loads(text).items() for name in names.split()}


def default_fields(family: str) -> dict[str, Any]:
    """Defaults of the configuration class of transformers (4.57, else 5.24) for a ``model_type``; no false flags."""
    return _defaults().get(family, {})
