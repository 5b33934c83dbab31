"""Public functions and classes for whole language models; :mod:`cdmpp.predict.llm` has the code."""

from __future__ import annotations

from cdmpp.predict.llm import *  # noqa: F403
from cdmpp.predict.llm import __all__ as __all__
