"""What is planned: the request, the model that it names, and the device that it is held against."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lifetrace.analysis import hardware
from lifetrace.analysis.ceilings import Ceilings, from_datasheet
from lifetrace.analysis.memory_plan import FORMATS
from lifetrace.errors import ModelError, UsageError

from .plan_model import MOST, check_heads
from .workload import ModelSource, catalogue, config_from_values, model_config

LOCAL = "local"
LONGEST = 2**20  # positions of a model that names no limit
SCALES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Dimensions:
    """A model of Llama's make by its dimensions; what is null takes a default that the plan names."""

    hidden_size: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    tied: bool = False

    @property
    def given(self) -> bool:
        """Whether any dimension was given."""
        return self.tied or any(value is not None for name, value in vars(self).items() if name != "tied")


@dataclass(frozen=True)
class Request:
    """What is asked. Null takes the trace's, else the default; `prompt_length` follows `context`.

    `config` is that of a model at hand, in place of a name.
    """

    model: str | None = None
    config: Any = None
    dimensions: Dimensions = Dimensions()
    dtype: str | None = None
    kv_dtype: str | None = None
    batch: int | None = None
    prompt_length: int | None = None
    context: int | None = None
    max_new_tokens: int | None = None
    attention: str | None = None
    gpu: str | None = None
    gpus: int = 1
    memory: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Subject:
    """The model that is planned, and what its origin says of a run."""

    name: str
    source: str
    config: Any
    dtype: str | None = None
    batch: int | None = None
    prompt_length: int | None = None
    new_tokens: int | None = None
    attention: str | None = None
    trace: Path | None = None
    notes: tuple[str, ...] = ()


# -- models ------------------------------------------------------------------------------------


def find_subject(request: Request) -> Subject:
    """Find the model: a trace, a config file or folder, a catalogue name, a hub id, or dimensions.

    Raises:
        UsageError, ModelError: there is none, or both a model and dimensions.
    """
    if request.config is not None:
        return Subject(getattr(request.config, "name_or_path", "") or "the model", "config", request.config)
    if request.model is None:
        return _from_dimensions(request.dimensions)
    if request.dimensions.given:
        raise UsageError("Dimensions describe a model of their own; leave out either them or the model.")
    path = Path(request.model)
    if (path / "run.json").is_file():
        return _from_trace(path)
    if path.is_file() and path.name == "run.json":
        return _from_trace(path.parent)
    if path.is_file() and not request.model.endswith(".gguf"):
        config = model_config(ModelSource(path.stem, random_weights=True, config_file=str(path)))
        return Subject(ModelSource(path.stem, config_file=str(path)).name, f"config {path}", config)
    known = request.model in catalogue() and not path.exists()
    if not known and "/" not in request.model and not path.exists() and request.model != "demo":
        _refuse_unknown(request.model)
    config = model_config(ModelSource(request.model, random_weights=known, trust_remote_code=request.trust_remote_code))
    return Subject(path.name if path.is_dir() else request.model, "catalogue" if known else "config", config)


def _refuse_unknown(name: str) -> None:
    """A bare name is a catalogue name, or one of the few hub ids without an owner that are cached here."""
    near = difflib.get_close_matches(name.casefold(), catalogue(), n=3, cutoff=0.5)
    try:
        model_config(ModelSource(name))
    except ModelError:
        like = f" Did you mean {' or '.join(near)}?" if near else f" It has {', '.join(catalogue())}."
        raise ModelError(
            f"There is no model {name} in the catalogue, nor a file or folder of that name.{like} "
            "A config.json, a trace, a hub id that is cached, or --hidden-size, --layers and --heads do as well."
        ) from None


def _from_dimensions(given: Dimensions) -> Subject:
    if given.hidden_size is None or given.layers is None or given.heads is None:
        raise UsageError(
            "Name a model, or give its dimensions: --hidden-size, --layers and --heads at least. "
            f"The catalogue has {', '.join(catalogue())}."
        )
    _check_given(given)
    notes = []
    intermediate, vocabulary = given.intermediate_size, given.vocab_size
    if intermediate is None:
        intermediate = -(-(given.hidden_size * 8 // 3) // 256) * 256
        notes.append(f"--intermediate-size was not given: {intermediate:,}, Llama's ⅔ · 4 of the width in steps of 256")
    if vocabulary is None:
        vocabulary = 32_000
        notes.append("--vocab-size was not given: 32,000, Llama 2's")
    values: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": given.hidden_size,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.heads,
        "num_key_value_heads": given.kv_heads if given.kv_heads is not None else given.heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": given.tied,
        "max_position_embeddings": LONGEST,
        "pad_token_id": None,
    }
    if given.head_dim is not None:
        values["head_dim"] = given.head_dim
    name = f"{given.layers} layers of {given.hidden_size:,}"
    return Subject(name, "dimensions", _config(values, name), notes=tuple(notes))


def _check_given(given: Dimensions) -> None:
    """Refuse sizes that no model has, by the options' names, before a config is made of them."""
    for name, value in vars(given).items():
        if name != "tied" and value is not None and not 0 < value <= MOST:
            raise UsageError(f"--{name.replace('_', '-')} is {value:,}; it has to be between 1 and {MOST:,}.")
    if given.head_dim is None:
        check_heads("The model", given.hidden_size, given.heads, given.kv_heads)


def _config(values: dict[str, Any], name: str) -> Any:
    try:
        return config_from_values(values)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise UsageError(f"{name} is no model: {' '.join(str(error).split())}.") from None
    except Exception as error:  # noqa: BLE001 - configs check themselves, each in its own way
        raise UsageError(f"{name} is no model: {' '.join(str(error).split())[:200]}.") from None


def _from_trace(folder: Path) -> Subject:
    from lifetrace.analysis.trace import read_trace

    meta = read_trace(folder).meta
    model, calls = meta.get("model") or {}, meta.get("calls") or []
    config = model.get("config")
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"The trace {folder} holds no config of its model; plan the model itself.")
    main: dict[str, Any] = next(
        (call for call in calls if call.get("kind") == "generate" and call.get("parent_step") is None), {}
    )
    prompts, news = main.get("prompt_tokens") or [], main.get("new_tokens") or []
    return Subject(
        name=str(model.get("id") or folder.name),
        source=f"trace {folder}",
        config=_config(config, str(folder)),
        dtype=model.get("dtype") if model.get("dtype") in FORMATS else None,
        batch=main.get("sequences"),
        prompt_length=max(prompts, default=None),
        new_tokens=max(news, default=None),
        attention=model.get("attention"),
        trace=folder,
    )


# -- devices -----------------------------------------------------------------------------------


def find_device(request: Request) -> tuple[Ceilings | None, int | None, str | None]:
    """The ceilings, the memory of one device in bytes, and its name, each null where none is asked for.

    Raises:
        UsageError: no such device; the message lists those that come near.
    """
    given = parse_bytes(request.memory) if request.memory is not None else None
    if request.gpu is None:
        return None, given, None
    if request.gpu == LOCAL:
        ceilings, name, here = _local()
        return ceilings, given or here, name
    sheet = hardware.find(request.gpu)
    if sheet is None:
        near = hardware.near_matches(request.gpu)
        names = ", ".join(near or (row.name for row in hardware.DEVICES))
        words = "Did you mean one of" if near else "The table has"
        raise UsageError(f"There is no GPU {request.gpu!r} in the table. {words} {names}? Or give --memory 24GB.")
    return from_datasheet(sheet.name), given or int(sheet.memory_bytes), sheet.name


def _local() -> tuple[Ceilings, str, int | None]:
    """The machine itself, as `lifetrace calibrate` measured it."""
    from . import calibrate
    from .environment import device_facts
    from .workload import pick_device

    device = pick_device("auto")
    ceilings, _ = calibrate.load(calibrate.device_key(device))
    if ceilings is None:
        raise UsageError("This machine has no ceilings yet; run `lifetrace calibrate` first.")
    return ceilings, ceilings.device.name, device_facts(device).get("memory_bytes")


def parse_bytes(text: str) -> int:
    """Read an amount of memory such as `24GB`, `80 GiB` or `1_000_000B`; a number without a unit may be any.

    Raises:
        UsageError: it is none, or not above 0.
    """
    match = re.fullmatch(r"\s*([\d.,_]+)\s*([kmgt]i?b?|b)\s*", text, re.IGNORECASE)
    try:
        number = float(match[1].replace(",", "").replace("_", "")) if match else 0.0
    except ValueError:
        number = 0.0
    unit = match[2].casefold() if match else "b"
    scale = 1 if unit == "b" else SCALES[unit if unit.endswith("b") else unit + "b"]
    if number * scale < 1:
        raise UsageError(f"{text!r} is no amount of memory with its unit; write 24GB (10⁹ bytes each) or 24GiB (2³⁰).")
    return int(number * scale)
