"""What the KV cache must hold by the model's config: the closed form beside the measured growth."""

from dataclasses import dataclass
from typing import Any

from .blocks import Array, numbers, step_rows
from .trace import Trace

WHOLE = {"full", "static"}
# What is asked of the cache here and by those who compare it with the form: read at once.
KV_COLUMNS = ("step", "layer", "kind", "length", "logical_bytes", "dtype")
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVForm:
    """Keys and values of one position of one sequence: 2 × layers × heads × width × bytes of an element."""

    layers: int
    heads: int
    width: int
    item_bytes: int

    @property
    def position_bytes(self) -> int:
        """Bytes that one more position of one sequence takes in all layers."""
        return 2 * self.layers * self.heads * self.width * self.item_bytes

    def bytes_after(self, trace: Trace) -> Array:
        """Bytes after each top-level step: sequences × positions × bytes of one; NaN where one is not known."""
        steps = step_rows(trace)
        return numbers(steps, "batch") * numbers(steps, "kv_len_after") * self.position_bytes


def kv_form(trace: Trace) -> KVForm | None:
    """The closed form of this trace's model; null where the config does not say it, or layers forget positions.

    Windows, latent vectors, recurrent states and quantized caches have other forms.
    """
    config = (trace.meta.get("model") or {}).get("config") or {}
    config = config.get("text_config") or config
    cache = trace.table("kv", KV_COLUMNS)
    kinds, dtypes = set(cache["kind"].unique().to_pylist()), cache["dtype"].unique().to_pylist()
    heads, width = _whole(config, "num_key_value_heads"), _head_width(config)
    layers = len(cache["layer"].unique())
    if not kinds or not kinds <= WHOLE or len(dtypes) != 1 or heads is None or width is None or not layers:
        return None
    item_bytes = _ITEM_BYTES.get(str(dtypes[0]).removeprefix("torch."))
    return None if item_bytes is None else KVForm(layers, heads, width, item_bytes)


def _head_width(config: dict[str, Any]) -> int | None:
    if "v_head_dim" in config:  # keys and values of different widths
        return None
    hidden, heads = _whole(config, "hidden_size"), _whole(config, "num_attention_heads")
    return _whole(config, "head_dim") or (hidden // heads if hidden and heads else None)


def _whole(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else None
