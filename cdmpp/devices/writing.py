"""A specification as the text of a TOML file, which :func:`cdmpp.devices.loading.load_device` reads back."""

from __future__ import annotations

import json
from typing import Any

from cdmpp.devices.spec import DeviceSpec


def specification_toml(spec: DeviceSpec, comment: str = "") -> str:
    """TOML with the figures that there are, in the order of :class:`DeviceSpec`, then a table of ceilings.

    Parameters
    ----------
    comment : str
        One line at the top.
    """
    values = spec.model_dump(mode="json", exclude_none=True)
    ceilings = values.pop("sustained", None)
    lines = [f"# {comment}"] if comment else []
    lines += [f"{name} = {_value(value)}" for name, value in values.items() if value not in ([], "")]
    if ceilings:
        lines += ["", "[sustained]", *(f"{name} = {_value(value)}" for name, value in ceilings.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for surrogates and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
