"""Environment variables that begin with CDMPP_: settings, variables of other parts, Kubernetes' own, and mistakes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

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

    Raises
    ------
    ValueError
        The message names each unknown variable with the nearest known one, and no value.
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
