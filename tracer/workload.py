"""The work that `run` traces: loads a model and its tokenizer, prepares prompts and settings."""

import difflib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from lifetrace.errors import ModelError, UsageError

DEMO = "demo"
REMOTE = "transformers_modules"  # where transformers puts the code that a repository brings
DTYPES = ("auto", "float32", "float16", "bfloat16")
# Heads that stand on an encoder or a classifier: their weights hold no language model head.
NO_LANGUAGE_MODEL = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM",
    "ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining", "ForImageClassification",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSource:
    """Which model, from where, in what form."""

    model: str = DEMO
    revision: str | None = None
    random_weights: bool = False
    config_file: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: str | None = None
    attention: str | None = None
    trust_remote_code: bool = False
    pickled_weights: bool = False

    @property
    def name(self) -> str:
        """What to call the model: a config file stands for itself."""
        if self.config_file is None:
            return self.model
        path = Path(self.config_file)
        return path.parent.name if path.name == "config.json" and path.parent.name else path.stem


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate. `tokenizer` is None where random weights have none; `notes` say what was trusted."""

    model: Any
    tokenizer: Any
    device: torch.device
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompts:
    """What is asked: prompts as written, whether through the chat template, an exact length in tokens."""

    texts: tuple[str, ...]
    chat: bool = False
    length: int | None = None


def load(source: ModelSource) -> Loaded:
    """Load the model and its tokenizer.

    Raises:
        ModelError: it cannot be found or loaded, or is no causal language model.
        UsageError: the device is not there, or lacks the dtype.
    """
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    if source.model.endswith(".gguf"):
        os.environ.setdefault("TQDM_DISABLE", "1")  # the GGUF reader draws a bar of its own
    device = pick_device(source.device)
    config = _config(source)
    refuse_unless_causal(config, source.name)
    dtype = _dtype(source.dtype, config, device)
    _check_dtype(dtype, device)
    model = _random_model(source, config, dtype, device) if source.random_weights else _trained_model(source, dtype)
    if source.device_map is None:
        model = model.to(device)
    tokenizer = _tokenizer(source)
    facts = {
        "id": source.name,
        "revision": source.revision,
        "weights": "random" if source.random_weights else "trained",
    }
    return Loaded(model.eval(), tokenizer, device, facts, _trusted(source, model, tokenizer))


def _trusted(source: ModelSource, model: Any, tokenizer: Any) -> tuple[str, ...]:
    """What of a stranger's was run or unpacked because an option said so."""
    modules = (type(thing).__module__ for thing in (model, tokenizer))
    own = sorted({name.removeprefix(f"{REMOTE}.") for name in modules if name.partition(".")[0] == REMOTE})
    notes = [f"code that the model's repository brings was run: {name} (--trust-remote-code)" for name in own]
    if source.pickled_weights:
        notes.append("pickled weights were let in, as weights only (--pickled-weights)")
    return tuple(notes)


def pick_device(name: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that is there.

    Raises:
        UsageError: when it is not.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"There is no device {name!r}; give auto, cpu, cuda or cuda:N.") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            have = (
                f"this machine has {count} CUDA device{'s' * (count != 1)}"
                if count
                else "no CUDA device is visible here"
            )
            raise UsageError(f"There is no device {name}: {have}. Use --device cpu, or auto.")
    elif device.type != "cpu":
        raise UsageError(f"lifetrace runs on cpu and cuda, not on {device.type!r}; give --device cpu.")
    return device


def refuse_unless_causal(config: Any, name: str) -> None:
    """Raise ModelError unless the config is of a causal language model."""
    from transformers import AutoModelForCausalLM

    supported = "lifetrace traces causal language models: what AutoModelForCausalLM loads and generate() runs."
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder–decoder ({config.model_type}). {supported}")
    architecture = next(iter(getattr(config, "architectures", None) or ()), None)
    if architecture is not None and architecture.endswith(NO_LANGUAGE_MODEL):
        raise ModelError(f"{name} holds a {architecture}, which is no causal language model. {supported}")
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not remote and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{name} is of type {config.model_type}, which has no causal language model. {supported}")


def model_config(source: ModelSource) -> Any:
    """The config of a causal language model, quietly; catalogue names count where the weights may be random.

    Raises:
        ModelError: it cannot be found, or is no causal language model.
        UsageError: the config file is none.
    """
    import transformers.utils.logging

    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    config = _config(source)
    refuse_unless_causal(config, source.name)
    return config


def _location(source: ModelSource) -> tuple[str, dict[str, Any]]:
    """Where from_pretrained finds the model, and the arguments that go with it."""
    options: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if source.revision is not None:
        options["revision"] = source.revision
    if source.model == DEMO:
        return str(resources.files("lifetrace.demo_model")), options
    path = Path(source.model)
    if source.model.endswith(".gguf"):
        if not path.is_file():
            raise ModelError(f"There is no file {source.model}; check the path of the GGUF file.")
        _require_gguf()
        return str(path.parent), options | {"gguf_file": path.name}
    looks_local = path.exists() or source.model.startswith((".", "/", "~")) or source.model.count("/") > 1
    if looks_local and not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise ModelError(
            f"{source.model} {kind}; --model takes a hub id, a folder with a config.json, or a .gguf file."
        )
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"The folder {source.model} has no config.json; give the folder that save_pretrained wrote.")
    return source.model, options


def _require_gguf() -> None:
    from importlib.util import find_spec

    if find_spec("gguf") is None:
        raise ModelError('A .gguf file needs the package gguf; install it with: pip install "lifetrace-llm[gguf]".')


def _config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    if source.config_file is not None:
        return _config_from_file(source.config_file)
    if source.random_weights and source.model in catalogue():
        return config_from_catalogue(source.model)
    location, options = _location(source)
    try:
        return AutoConfig.from_pretrained(location, **options)
    except Exception as error:  # noqa: BLE001 - the loaders raise whatever the file made them raise
        raise _load_error(source, error) from None


def _config_from_file(file: str) -> Any:
    path = Path(file)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"There is no file {file}; --config takes a config.json.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return config_from_values(values)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{file} is no model config: {first_line(error)}.") from None


def config_from_values(values: dict[str, Any]) -> Any:
    """Build a config from a dictionary with `model_type`."""
    from transformers import AutoConfig

    if not isinstance(values, dict) or "model_type" not in values:
        raise ValueError("it names no model_type")
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def catalogue() -> dict[str, dict[str, Any]]:
    """Published models by lower-case name: their dimensions, and `parameters` as published."""
    text = resources.files("lifetrace").joinpath("model_catalogue.json").read_text(encoding="utf-8")
    models: dict[str, dict[str, Any]] = json.loads(text)
    return models


def config_from_catalogue(name: str) -> Any:
    """The config of a catalogued model."""
    values = {key: value for key, value in catalogue()[name].items() if key != "parameters"}
    return config_from_values(values)


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """The asked dtype; `auto` is the checkpoint's, and float32 on a CPU."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cpu":
        return torch.float32
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.float32


def _check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    probe = torch.ones(2, 2, dtype=dtype, device=device)
    try:
        torch.softmax(probe @ probe, dim=-1)
    except RuntimeError:
        name = str(dtype).removeprefix("torch.")
        raise UsageError(f"The device {device} does not compute in {name}; choose another --dtype.") from None


def _trained_model(source: ModelSource, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    location, options = _location(source)
    if source.device_map is not None:
        options["device_map"] = _device_map(source.device_map)
    if source.attention is not None:
        options["attn_implementation"] = source.attention
    if not source.pickled_weights and "gguf_file" not in options:
        options["use_safetensors"] = True
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # else transformers asks a server to convert weights
    try:
        return AutoModelForCausalLM.from_pretrained(location, dtype=dtype, weights_only=True, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the loaders raise whatever the file made them raise
        raise _load_error(source, error) from None


def _device_map(text: str) -> Any:
    """A device map as transformers takes it: a word such as `auto`, or JSON of module to device."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f'--device-map is no JSON: {error}. Give auto, or {{"module": "device"}}.') from None


def _random_model(source: ModelSource, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if source.attention is not None:
        options["attn_implementation"] = source.attention
    torch.manual_seed(0)
    try:
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a config may describe anything
        raise ModelError(f"No model can be built from the config of {source.name}: {first_line(error)}.") from None


def _tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer; random weights may have none, then prompts become their UTF-8 bytes."""
    from transformers import AutoTokenizer

    if source.random_weights and (source.config_file is not None or source.model in catalogue()):
        return None
    location, options = _location(source)
    try:
        return AutoTokenizer.from_pretrained(location, **options)
    except Exception as error:  # noqa: BLE001 - the loaders raise whatever the file made them raise
        if source.random_weights:
            return None
        raise ModelError(f"The tokenizer of {source.model} cannot be loaded: {first_line(error)}.") from None


def _load_error(source: ModelSource, error: Exception) -> ModelError:
    text = str(error)
    name = source.model
    if "trust_remote_code" in text or "custom code" in text:
        return ModelError(f"{name} brings its own code; add --trust-remote-code if you trust it.")
    if "safetensors" in text and "file named" in text and not source.pickled_weights:
        return ModelError(
            f"{name} has no weights in safetensors. If it has pickled ones and you trust them, add --pickled-weights: "
            "they are read as weights only."
        )
    if name.endswith(".gguf"):
        return ModelError(
            f"{name} cannot be read as GGUF: {first_line(error)}. The file may be cut short; get it again."
        )
    if name in catalogue() and not Path(name).exists():
        return ModelError(f"{name} is a name of the catalogue, which holds no weights; add --weights random.")
    if name != DEMO and not Path(name).exists():
        offline = " (offline mode is on)" if os.environ.get("HF_HUB_OFFLINE") else ""
        near = difflib.get_close_matches(name, [DEMO, *catalogue()], n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        return ModelError(
            f"The model {name} could not be had from the hub{offline}: it is not cached here, and it is "
            f"unknown there or the network cannot be reached.{hint} "
            "A local folder, a .gguf file or `demo` needs no network."
        )
    return ModelError(f"{name} cannot be loaded: {first_line(error)}.")


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, without its full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")


# -- prompts ---------------------------------------------------------------------------------


def context_length(model: Any) -> int | None:
    """Positions that the model was built for, None where its config does not say."""
    config = model.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def check_prompts(prompts: Prompts, loaded: Loaded) -> None:
    """Raise UsageError for prompts that no tokenizer can take."""
    for text in prompts.texts:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"The prompt holds a lone surrogate at character {error.start}, which is no text; "
                "pass it as valid UTF-8, for example with --prompt-file."
            ) from None
    if prompts.chat and getattr(loaded.tokenizer, "chat_template", None) is None:
        raise UsageError("This model's tokenizer has no chat template; leave out --chat.")


def encode(prompts: Prompts, loaded: Loaded) -> dict[str, torch.Tensor]:
    """Tokenize the prompts into `input_ids` and `attention_mask`, shape [prompts, longest], padded left.

    Raises:
        UsageError: a prompt gives no token and the model has no begin token to stand in, or
            several prompts need padding and there is no token to pad with.
    """
    rows = [_with_begin(_ids(text, prompts, loaded), loaded) for text in prompts.texts]
    if prompts.length is not None:
        rows = [_exact(row, prompts.length) for row in rows]
    longest = max(len(row) for row in rows)
    pad = _pad_id(loaded) if any(len(row) < longest for row in rows) else 0
    ids = [[pad] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    device = loaded.device
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _ids(text: str, prompts: Prompts, loaded: Loaded) -> list[int]:
    if loaded.tokenizer is None:
        vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
        return [byte % vocabulary for byte in text.encode("utf-8")]
    if prompts.chat:
        message = [{"role": "user", "content": text}]
        encoded = loaded.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    return list(loaded.tokenizer(text)["input_ids"])


def _with_begin(ids: list[int], loaded: Loaded) -> list[int]:
    if ids:
        return ids
    begin = getattr(loaded.tokenizer, "bos_token_id", None)
    if begin is None:
        begin = getattr(loaded.model.generation_config, "bos_token_id", None)
    if begin is None:
        raise UsageError("The prompt is empty and this model has no begin token to stand in; give some text.")
    return [begin]


def _exact(ids: list[int], length: int) -> list[int]:
    """Repeat or cut a prompt to an exact number of tokens; a begin token is not repeated."""
    body = ids[1:] or ids
    repeated = ids + body * (length // len(body) + 1)
    return repeated[:length]


def _pad_id(loaded: Loaded) -> int:
    tokenizer, generation = loaded.tokenizer, loaded.model.generation_config
    for owner in (tokenizer, generation):
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(owner, name, None)
            value = value[0] if isinstance(value, list) else value
            if isinstance(value, int):
                return value
    if tokenizer is None:
        return 0
    raise UsageError(
        "Prompts of different length need padding, and this model has neither a pad nor an end token; "
        "give one prompt, or prompts of equal length."
    )


def check_length(loaded: Loaded, prompt_tokens: int, new_tokens: int) -> None:
    """Raise UsageError when prompt and answer do not fit into the model's context."""
    context = context_length(loaded.model)
    if context is None or prompt_tokens + new_tokens <= context:
        return
    if prompt_tokens >= context:
        raise UsageError(
            f"The prompt has {prompt_tokens:,} tokens and the model's context holds {context:,}; shorten the prompt."
        )
    raise UsageError(
        f"The prompt's {prompt_tokens:,} tokens and {new_tokens:,} new ones exceed the model's context of "
        f"{context:,}; use --max-new-tokens {context - prompt_tokens} or less."
    )


# -- settings of generate --------------------------------------------------------------------


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `key=value` pairs of generation settings; values are JSON where they parse, else text.

    Raises:
        UsageError: for what is no pair, or a key that no generation config has.
    """
    from transformers import GenerationConfig

    known = set(vars(GenerationConfig()))
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{pair!r} is no setting; write it as key=value, such as repetition_penalty=1.1.")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else "Its settings are those of GenerationConfig."
            raise UsageError(f"generate() has no setting {key!r}. {hint}")
        settings[key] = _setting(value)
    return settings


def _setting(text: str) -> Any:
    """Read a value as JSON, or as Python writes True, False and None; anything else is text."""
    spelled = {"True": True, "False": False, "None": None}
    if text in spelled:
        return spelled[text]
    try:
        return json.loads(text)
    except ValueError:
        return text
