"""What a plan tells, as one document: what is printed, drawn and given as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from .memory_plan import Fit, Option, PredictionRow, Quantity
from .time_plan import Crossovers, StepFloor


@dataclass(frozen=True)
class Settings:
    """The settings in full. `context` is positions in the cache at the end, `new_tokens` what that lets come."""

    dtype: str
    kv_dtype: str | None
    batch: int
    prompt_length: int
    context: int
    new_tokens: int
    attention: str
    gpu: str | None
    gpus: int


@dataclass(frozen=True)
class KindRow:
    """Parameters of one kind of module, and their share of all."""

    kind: str
    parameters: int
    share: float


@dataclass(frozen=True)
class PeakTensor:
    """Equal tensors that are live at the peak of a forward beside weights and KV."""

    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes_: int


@dataclass(frozen=True)
class Plan:
    """All that is told of a model under some settings."""

    name: str
    source: str
    architecture: str
    parameters: int
    dimensions: dict[str, int | None]
    settings: Settings
    kinds: tuple[KindRow, ...]
    tied_head: bool
    block_shares: dict[str, float]
    weights: tuple[Quantity, ...]
    memory: tuple[Quantity, ...]
    training: tuple[Quantity, ...]
    peak_module: str | None
    peak_tensors: tuple[PeakTensor, ...]
    score_growth: tuple[int, int, int]
    fit: Fit | None
    options: tuple[Option, ...]
    steps: tuple[StepFloor, ...]
    work: tuple[Quantity, ...]
    generate_floor_ns: float | None
    crossovers: Crossovers
    ceilings_source: str | None
    against: tuple[PredictionRow, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists; quantities by their keys, each with its formula."""
        plain = asdict(self)
        for name in ("weights", "memory", "training", "work"):
            plain[name] = {quantity.key: quantity.to_json() for quantity in getattr(self, name)}
        if self.fit is not None:
            plain["fit"]["fits"] = self.fit.fits
        for step in plain["steps"]:
            step["bytes"] = step.pop("bytes_")
        for tensor in plain["peak_tensors"]:
            tensor["bytes"] = tensor.pop("bytes_")
        shorter, longer, times = self.score_growth
        plain["score_growth"] = {"from": shorter, "to": longer, "times": times}
        document: dict[str, Any] = json.loads(json.dumps(plain, allow_nan=False))
        return document


@dataclass(frozen=True)
class Curves:
    """What is drawn: bytes by batch over context, floors of decode by context over batch, of prefill over prompts."""

    weights: int
    memory: dict[int, list[tuple[int, int]]]
    decode: dict[int, list[tuple[int, StepFloor]]]
    prefill: list[tuple[int, StepFloor]]
