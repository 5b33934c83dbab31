"""Coverage of a model: operators, devices, protocols, and its accuracy."""

from __future__ import annotations

from typing import Any

from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.score import parse_contexts
from cdmpp.model.nn.config import LEVELS
from cdmpp.predict.support_matrix import support_matrix
from cdmpp.programs.operators import operator_types
from cdmpp.programs.query_options import ALL_FRAMEWORKS, BACKENDS, DEFAULT_PROTOCOL, PROTOCOLS


def support(artifact: Artifact) -> dict[str, Any]:
    """Operators with their fields, training devices, query options, accuracy by source, and coverage, for JSON.

    ``matrix`` is :func:`cdmpp.predict.support_matrix.support_matrix`: domain and error by operator, types and device.
    """
    trained: dict[str, set[str]] = {}
    for context in parse_contexts(artifact.contexts)[0]:
        trained.setdefault(context.operator, set()).add(f"{context.backend}/{context.protocol}/{context.dtype}")
    return {
        "model_id": artifact.model_id,
        "operators": {
            name: {
                "trained": sorted(trained.get(name, ())),
                "fields": {
                    field_name: ("required" if info.is_required() else info.default)
                    for field_name, info in kind.model_fields.items()
                    if field_name != "operator"
                },
            }
            for name, kind in sorted(operator_types().items())
        },
        "trained_devices": list(artifact.device_names),
        "backends": list(BACKENDS),
        "protocols": list(PROTOCOLS),
        "frameworks": list(ALL_FRAMEWORKS),
        "default_protocol": DEFAULT_PROTOCOL,
        "quantile_range": [LEVELS[0], LEVELS[-1]],
        "accuracy": artifact.manifest.get("metrics", {}),
        "matrix": support_matrix(artifact),
    }
