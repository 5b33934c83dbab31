"""Fields of a configuration, checked as they are read, and what most decoders share.

Defaults are those of the configuration classes of transformers: published files leave out fields at their default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.llm.config import Experts, LLMConfig

#: Largest accepted size: above every published model by a factor of more than 30.
MAX_SIZE, MAX_LAYERS = 2**24, 10_000


class _Noted(dict[str, Any]):
    """Fields that note the names of those that are read."""

    def __init__(self, values: Mapping[str, Any], names: set[str]) -> None:
        super().__init__(values)
        self.names = names

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


class Fields:
    """Fields of a configuration, checked as they are read; ``read`` has the names of those that were."""

    def __init__(self, values: Mapping[str, Any], path: str, read: set[str] | None = None) -> None:
        self.read: set[str] = set() if read is None else read
        self.values, self.path = _Noted(values, self.read), path

    def changed(self, **values: Any) -> Fields:
        """These fields with other values."""
        return Fields({**self.values, **values}, self.path, self.read)

    def size(self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """A whole number of the configuration; without a default it is required."""
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "missing", f"a config.json of this model_type has {name}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", f"a whole number from {minimum} to {maximum}")
        return value

    def per_token(self, name: str, default: int | None = None) -> float:
        """Experts of a token: a whole number, or with adaptive gating the expected number, such as 1.3."""
        value = self.values.get(name)
        return value if isinstance(value, float) and value % 1 and 1 < value < MAX_SIZE else self.size(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value of the configuration."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A text of the configuration."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 100:
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", "a short text")
        return value

    def sizes(self, name: str) -> list[int]:
        """A list of whole numbers; empty where the field is not given."""
        values = self.values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.error(name, f"{str(values)[:80]!r} is not allowed", "a list of whole numbers")
        return values

    def error(self, name: str, problem: str, hint: str = "") -> FieldError:
        """The error of one field."""
        path = f"{self.path}.{name}"
        return FieldError.at(path, f"{problem}", hint=hint)


def common_fields(f: Fields, **given: Any) -> LLMConfig:
    """Fields that most decoders share; ``own`` are those of the family."""
    layers, hidden = f.size("num_hidden_layers", maximum=MAX_LAYERS), f.size("hidden_size")
    heads = given.pop("heads", None) or f.size("num_attention_heads")
    kv_heads = given.pop("kv_heads", None) or f.size("num_key_value_heads", heads)
    head_dim = given.pop("head_dim", None) or f.values.get("head_dim")
    if head_dim is None and hidden % heads:
        raise f.error("num_attention_heads", f"{heads} does not divide hidden_size={hidden}", "or give head_dim")
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads={heads}")
    window, windowed = given.pop("window", (None, 0))
    values: dict[str, Any] = {
        "model_type": f.text("model_type", "llama"),
        "layers": layers,
        "hidden": hidden,
        "vocab": f.size("vocab_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads if head_dim is None else f.size("head_dim", head_dim),
        "intermediate": f.size("intermediate_size"),
        "activation": f.text("hidden_act", "silu"),
        "tied": f.flag("tie_word_embeddings", False),
        "window": window if windowed else None,
        "windowed_layers": windowed,
    }
    return LLMConfig(**{**values, **given})


def window_of(f: Fields, layers_without_types: int, *, default: int | None = None) -> tuple[int | None, int]:
    """Window, and the number of layers that have it: counted in ``layer_types`` where it is given."""
    if f.values.get("sliding_window") is None and default is None:
        return None, 0
    window, types = f.size("sliding_window", default), f.values.get("layer_types")
    if types is None:
        return window, layers_without_types
    if not isinstance(types, list) or len(types) != f.size("num_hidden_layers", maximum=MAX_LAYERS):
        raise f.error("layer_types", "is not a list with one type per layer")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise f.error("layer_types", f"{str(unknown[0])[:80]!r} is not known", "full_attention or sliding_attention")
    return window, types.count("sliding_attention")


def layer_count(f: Fields) -> int:
    return f.size("num_hidden_layers", maximum=MAX_LAYERS)


def checked_experts(f: Fields, experts: Experts, name: str) -> Experts | Any:
    """The experts, or None where no layer has them."""
    if experts.topk > experts.count:
        raise f.error("num_experts_per_tok", f"{experts.topk} exceeds {name}={experts.count}")
    return experts if experts.layers else None


def experts_of(
    f: Fields,
    layers: int,
    *,
    count: str = "n_routed_experts",
    width: int | None = None,
    shared: str = "moe_intermediate_size",
    latent: int = 0,
) -> Experts | Any:
    """The experts of ``layers`` layers, or None where there are none.

    ``count`` and ``shared`` name the fields with the number of routed experts and with the columns of a shared one;
    ``width``: columns of a routed one, by default those of the field ``moe_intermediate_size``.
    """
    width = f.size("moe_intermediate_size") if width is None else width
    shared_columns = f.size("n_shared_experts", 0, minimum=0) * f.size(shared, width)
    experts = Experts(f.size(count), f.per_token("num_experts_per_tok"), width, shared_columns, False, layers, latent)
    return checked_experts(f, experts, count)
