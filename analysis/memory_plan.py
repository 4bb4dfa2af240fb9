"""What a model takes, by formulas: weights, KV, activations, logits, scores, training, and what fits.

One function a physical quantity. Each returns a `Quantity`, the number together with its formula
with the values filled in, so that what is printed and how it came about cannot disagree. Nothing
here knows a model: dimensions come from real modules, and caches from real caches, elsewhere.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

GROUP_SIZE = 128
ADAM = (("weights, 16 bit", 2), ("gradients, 16 bit", 2), ("weights, float32", 4), ("momentum", 4), ("variance", 4))


@dataclass(frozen=True)
class Quantity:
    """A number of the plan. `unit` is B, B/token, parameters, FLOP or ns; `value` is null where it is unknown."""

    key: str
    name: str
    value: int | None
    unit: str
    formula: str

    def to_json(self) -> dict[str, Any]:
        """Value, unit and formula."""
        return {"value": self.value, "unit": self.unit, "formula": self.formula}


@dataclass(frozen=True)
class Format:
    """How weights are stored. `dtype` is that of all that is not quantized, and of activations.

    A quantized matrix has `bits` a number, and a scale of `scale_bytes` for each group of its
    numbers: `group` is `tensor`, `row` or so many inputs of a row.
    """

    name: str
    bits: int
    dtype: str
    multiplied: str
    group: str | int | None = None
    scale_bytes: int = 0

    @property
    def quantized(self) -> bool:
        """Whether matrices are stored in another type than the rest."""
        return self.group is not None

    @property
    def words(self) -> str:
        """What is stored, in a few words."""
        if not self.quantized:
            return self.name
        scales = {"tensor": "a float32 scale a matrix", "row": "a float32 scale a row"}
        return f"{self.name}, {scales.get(str(self.group), f'a 16-bit scale for each {self.group} weights')}"


FORMATS = {
    "float32": Format("float32", 32, "float32", "float32"),
    "float16": Format("float16", 16, "float16", "float16"),
    "bfloat16": Format("bfloat16", 16, "bfloat16", "bfloat16"),
    "float8": Format("float8", 8, "bfloat16", "float8_e4m3fn", "tensor", 4),
    "int8": Format("int8", 8, "bfloat16", "bfloat16", "row", 4),
    "int4": Format("int4", 4, "bfloat16", "bfloat16", GROUP_SIZE, 2),
}
SHORT_NAMES = {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1}


@dataclass(frozen=True)
class Matrices:
    """Equal matrices of layers that a quantized format packs: `count` of [rows, columns] inputs along columns."""

    count: int
    rows: int
    columns: int

    @property
    def parameters(self) -> int:
        """Numbers in all of them."""
        return self.count * self.rows * self.columns


@dataclass(frozen=True)
class CacheGroup:
    """Equal layers of a cache, of one sequence: `position_numbers` a position held, `state_numbers` at any length.

    `shapes` are those of one layer's tensors [batch, heads, positions, width]; `capacity` is the number of
    positions that a window lets it hold, null where it grows without end. `item_bytes` of one number.
    """

    kind: str
    layers: int
    shapes: tuple[tuple[int, ...], ...]
    position_numbers: int
    state_numbers: int
    heads: int | None
    capacity: int | None
    item_bytes: int

    def bytes_at(self, batch: int, context: int) -> int:
        """Bytes of the positions held after so many."""
        held = context if self.capacity is None else min(context, self.capacity)
        return self.layers * batch * (self.position_numbers * held + self.state_numbers) * self.item_bytes


# -- weights -----------------------------------------------------------------------------------


def weight_bytes(parameters: int, matrices: Sequence[Matrices], stored: Format) -> Quantity:
    """Bytes of the weights in a format.

    Unquantized: parameters × item. Quantized: the matrices of layers at `bits` each with their
    scales, and all else (embedding, head, norms, biases, routers) at 2 B, as GPTQ, AWQ,
    bitsandbytes and FP8 checkpoints keep it.
    """
    name = f"weights, {stored.words}"
    if not stored.quantized:
        item = stored.bits // 8
        formula = f"{parameters:,} parameters × {item} B"
        return Quantity(f"weights_{stored.name}", name, parameters * item, "B", formula)
    packed = sum(matrix.parameters for matrix in matrices)
    numbers, scales = packed * stored.bits // 8, sum(_scales(matrix, stored) for matrix in matrices)
    rest = (parameters - packed) * 2
    formula = (
        f"{packed:,} in matrices of layers × {stored.bits / 8:g} B + {scales:,} scales × {stored.scale_bytes} B"
        f" + {parameters - packed:,} others × 2 B"
    )
    return Quantity(f"weights_{stored.name}", name, numbers + scales * stored.scale_bytes + rest, "B", formula)


def _scales(matrix: Matrices, stored: Format) -> int:
    """How many scales the matrices need."""
    if stored.group == "tensor":
        return matrix.count
    groups = 1 if stored.group == "row" else math.ceil(matrix.columns / int(stored.group or 1))
    return matrix.count * matrix.rows * groups


def embedding_bytes(vocabulary: int, width: int, dtype: str) -> Quantity:
    """The table of token embeddings [vocabulary, width]."""
    item = ITEM_BYTES[dtype]
    formula = f"{vocabulary:,} tokens × {width:,} × {item} B"
    return Quantity("embedding", f"embedding, {dtype}", vocabulary * width * item, "B", formula)


def training_bytes(parameters: int) -> list[Quantity]:
    """Mixed-precision training with Adam, 16 B a parameter (Rajbhandari et al. 2020, ZeRO, section 3.1).

    Two bytes each for 16-bit weights and gradients, four each for the float32 copy of the weights
    and Adam's two moments; activations come on top. The total first, then its parts.
    """
    each = sum(size for _, size in ADAM)
    total = Quantity(
        "training", "mixed-precision Adam", parameters * each, "B", f"{parameters:,} parameters × {each} B"
    )
    parts = [
        Quantity(f"training_{number}", f"  {name}", parameters * size, "B", f"{parameters:,} parameters × {size} B")
        for number, (name, size) in enumerate(ADAM)
    ]
    return [total, *parts]


# -- KV cache ----------------------------------------------------------------------------------


def kv_bytes_per_token(groups: Sequence[CacheGroup]) -> Quantity:
    """Bytes that one more position of one sequence adds while all layers grow; 0 for states alone.

    With plain keys and values 2 · layers · KV heads · head width · item (Shazeer 2019 for fewer
    KV heads than heads); what a layer keeps, a latent for instance, is read off its tensors.
    """
    growing = [group for group in groups if group.position_numbers]
    value = sum(group.layers * group.position_numbers * group.item_bytes for group in growing)
    return Quantity("kv_per_token", "KV a token", value, "B/token", " + ".join(map(_per_token, growing)) or "no growth")


def _per_token(group: CacheGroup) -> str:
    widths = [f"{shape[1]:,} × {shape[3]:,}" for shape in group.shapes if len(shape) == 4]
    equal = len(widths) > 1 and len(set(widths)) == 1
    each = f"{len(widths)} × {widths[0]}" if equal else f"({' + '.join(widths)})"
    if not widths:
        each = f"{group.position_numbers:,}"
    layers = f"{group.layers} layers" if group.capacity is None else f"{group.layers} layers of {group.capacity:,}"
    return f"{layers} × {each} × {group.item_bytes} B"


def kv_bytes(groups: Sequence[CacheGroup], batch: int, context: int) -> Quantity:
    """Bytes of the cache after so many positions of each sequence; windows end it, states do not grow."""
    parts = []
    for group in groups:
        if group.position_numbers:
            held = context if group.capacity is None else min(context, group.capacity)
            numbers = group.layers * group.position_numbers * group.item_bytes
            parts.append(f"{batch:,} × {held:,} positions × {numbers:,} B")
        if group.state_numbers:
            parts.append(f"{batch:,} × {group.layers * group.state_numbers * group.item_bytes:,} B of states")
    value = sum(group.bytes_at(batch, context) for group in groups)
    return Quantity("kv", f"KV at {context:,} positions, batch {batch:,}", value, "B", " + ".join(parts) or "no cache")


# -- activations -------------------------------------------------------------------------------


def hidden_state_bytes(batch: int, positions: int, width: int, dtype: str) -> Quantity:
    """One hidden state [batch, positions, width], what a layer hands to the next."""
    item = ITEM_BYTES[dtype]
    name = f"hidden state [{batch:,}, {positions:,}, {width:,}], {dtype}"
    formula = f"{batch:,} × {positions:,} × {width:,} × {item} B"
    return Quantity("hidden_state", name, batch * positions * width * item, "B", formula)


def score_bytes(batch: int, heads: int, queries: int, keys: int, dtype: str) -> Quantity:
    """One layer's matrix of attention scores [batch, heads, queries, keys].

    Eager attention writes it; flash attention (Dao et al. 2022) keeps a tile of it on the chip.
    """
    item = ITEM_BYTES[dtype]
    formula = f"{batch:,} × {heads:,} heads × {queries:,} × {keys:,} × {item} B"
    name = f"eager scores of one layer, {dtype}"
    return Quantity("scores", name, batch * heads * queries * keys * item, "B", formula)


def score_growth(shorter: int, longer: int) -> int:
    """How many times the scores of a longer prompt are those of a shorter one: the square of their ratio."""
    return (longer * longer) // (shorter * shorter)


def logit_bytes(batch: int, vocabulary: int, dtype: str, float32_copies: int) -> Quantity:
    """Logits of one position a sequence [batch, 1, vocabulary], and their float32 copies.

    `generate()` copies them to float32 before it processes them; from the second token on the
    copy of the step before lives until the new one replaces it: two at the same time.
    """
    item = ITEM_BYTES[dtype]
    value = batch * vocabulary * (item + 4 * float32_copies)
    formula = f"{batch:,} × {vocabulary:,} × ({item} B + {float32_copies} float32 × 4 B)"
    copies = "a float32 copy" if float32_copies == 1 else f"{float32_copies} float32 copies"
    return Quantity("logits", f"logits with {copies}", value, "B", formula)


# -- a run's memory ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """What is held at once at one moment of a run, in bytes. `transient` is all that is none of the others.

    `replicated_transient` is the part of it that tensor parallelism does not split: the residual stream.
    """

    name: str
    kv: int
    transient: int
    logits: int
    replicated_transient: int = 0

    @property
    def beside_weights(self) -> int:
        """All but the weights."""
        return self.kv + self.transient + self.logits


@dataclass(frozen=True)
class Footprint:
    """The moments of a run that may be its highest: prefill and last decode step, and the token choice after each."""

    moments: tuple[Moment, ...]

    @property
    def highest(self) -> Moment:
        """The moment of most bytes."""
        return max(self.moments, key=lambda moment: moment.beside_weights)


def peak_bytes(weights: int, footprint: Footprint) -> Quantity:
    """The most that is held at once: weights, KV, transient tensors and logits at the highest moment."""
    moment = footprint.highest
    formula = (
        f"{weights:,} B weights + {moment.kv:,} B KV + {moment.transient:,} B transient"
        f" + {moment.logits:,} B logits, in {moment.name}"
    )
    return Quantity("peak", "peak", weights + moment.beside_weights, "B", formula)


# -- several devices ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What decides how a model is divided: parameters that tensor parallelism splits, all parameters, heads, layers."""

    split_share: float
    heads: int | None
    kv_groups: tuple[CacheGroup, ...]
    layers: int
    layer_share: float
    ends_share: float


@dataclass(frozen=True)
class Split:
    """How weights and KV go over devices: the shares that the fullest device holds, and what is said of it.

    `kind` is `one`, `tensor` or `layers`.
    """

    kind: str
    devices: int
    weight_share: float
    kv_share: float
    words: str

    def bytes_on_one(self, weights: int, moment: Moment) -> int:
        """Bytes on the fullest device at a moment."""
        transient = moment.transient
        if self.kind == "tensor":
            divided = moment.transient - moment.replicated_transient
            transient = moment.replicated_transient + math.ceil(divided / self.devices)
        return round(weights * self.weight_share) + round(moment.kv * self.kv_share) + transient + moment.logits


def split(sizes: Sizes, devices: int) -> Split:
    """Divide a model over devices: by tensors where the heads divide, else by layers.

    Tensor parallelism (Shoeybi et al. 2019, Megatron-LM) gives each device the same share of each
    matrix and of the heads; norms, biases and routers are on every device, and so is a KV head
    where there are fewer of them than devices. By layers the fullest device has ⌈layers ÷ devices⌉
    of them, and the embedding or the head.
    """
    if devices == 1:
        return Split("one", 1, 1.0, 1.0, "one device holds everything")
    if sizes.heads is not None and sizes.heads % devices == 0:
        share = sizes.split_share / devices + 1 - sizes.split_share
        words = (
            f"tensor parallel: {sizes.heads // devices} of {sizes.heads} heads a device; norms, biases and routers "
            f"({1 - sizes.split_share:.2%} of the weights) on each"
        )
        kv_share = _kv_share(sizes.kv_groups, devices)
        if kv_share > 1 / devices * 1.001:
            words += f"; {kv_share * devices:.3g} times the KV in all, for KV heads do not divide by {devices}"
        return Split("tensor", devices, share, kv_share, words)
    most = math.ceil(sizes.layers / devices) / sizes.layers
    why = "it has no heads" if sizes.heads is None else f"{sizes.heads} heads do not divide by {devices}"
    words = f"by layers, for {why}: at most {math.ceil(sizes.layers / devices)} of {sizes.layers} layers a device"
    return Split("layers", devices, sizes.layer_share * most + sizes.ends_share, most, words)


def _kv_share(groups: Sequence[CacheGroup], devices: int) -> float:
    """Share of the KV that one device holds: whole heads, at least one; a latent, of one head, is on each."""
    shares = []
    for group in groups:
        bytes_ = group.layers * (group.position_numbers + group.state_numbers) * group.item_bytes
        share = 1 / devices if group.heads is None else math.ceil(group.heads / devices) / group.heads
        shares.append((bytes_, share))
    whole = sum(bytes_ for bytes_, _ in shares)
    return sum(bytes_ * share for bytes_, share in shares) / whole if whole else 1.0


def dividing(heads: int | None, most: int = 64) -> list[int]:
    """Numbers of devices that heads divide by."""
    return [1] if heads is None else [count for count in range(1, most + 1) if heads % count == 0]


# -- what fits ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """Whether a run fits: bytes on the fullest device at its highest moment beside its memory.

    `spare_bytes` is below 0 where bytes are missing. `weights_spare_bytes` is the memory of all
    devices less the weights alone. The largest batch and context are null where not even 1 fits.
    """

    devices: int
    memory_bytes: int
    needed_bytes: int
    spare_bytes: int
    weights_spare_bytes: int
    moment: str
    split: Split
    largest_batch: int | None
    largest_context: int | None
    largest_context_limit: int | None

    @property
    def fits(self) -> bool:
        """Whether the fullest device has enough memory."""
        return self.spare_bytes >= 0


@dataclass(frozen=True)
class Option:
    """A change of settings with which the run fits, and what it would need on the fullest device."""

    change: str
    settings: dict[str, Any]
    needed_bytes: int
    spare_bytes: int


def needed_bytes(weights: int, footprint: Footprint, divided: Split) -> tuple[int, Moment]:
    """Bytes on the fullest device at the moment that is highest there, and that moment."""
    return max(
        ((divided.bytes_on_one(weights, moment), moment) for moment in footprint.moments), key=lambda pair: pair[0]
    )


def largest(needed: Callable[[int], int], memory: int, most: int, least: int = 1) -> int | None:
    """The largest whole number up to `most` whose need fits into memory; null where not even `least` does.

    `needed` grows. The next try is where a straight line through the bounds meets the memory, and
    the middle of what is left after a try that left more than half: a nearly straight need takes a
    handful of tries, and any growing need ends.
    """
    low, low_bytes = least, needed(least)
    if low_bytes > memory:
        return None
    high, high_bytes = most, needed(most)
    if high_bytes <= memory:
        return most
    halve = False
    while high - low > 1:
        share = 0.5 if halve else (memory - low_bytes) / max(1, high_bytes - low_bytes)
        middle = min(high - 1, max(low + 1, low + int(share * (high - low))))
        found, width = needed(middle), high - low
        if found <= memory:
            low, low_bytes = middle, found
        else:
            high, high_bytes = middle, found
        halve = not halve and high - low > width // 2
    return low


# -- prediction beside measurement -------------------------------------------------------------


@dataclass(frozen=True)
class PredictionRow:
    """A predicted and a measured number. The residual is measured − predicted; null where one is missing."""

    key: str
    name: str
    predicted: int | None
    measured: int | None
    residual: int | None
    residual_share: float | None
    formula: str


def predictions(predicted: Sequence[Quantity], measured: dict[str, int | None]) -> list[PredictionRow]:
    """Put what was measured beside what was predicted, by the quantities' keys."""
    return [_prediction(quantity, measured.get(quantity.key)) for quantity in predicted]


def _prediction(quantity: Quantity, measured: int | None) -> PredictionRow:
    known = measured is not None and quantity.value is not None
    residual = measured - quantity.value if measured is not None and quantity.value is not None else None
    share = residual / quantity.value if known and residual is not None and quantity.value else None
    return PredictionRow(quantity.key, quantity.name, quantity.value, measured, residual, share, quantity.formula)
