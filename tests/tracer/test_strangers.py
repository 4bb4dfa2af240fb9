"""Models from strangers: nothing of theirs is run or unpacked unless an option says so; nothing is sent anywhere."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lifetrace
from lifetrace import workload
from lifetrace.errors import ModelError
from lifetrace.workload import ModelSource
from reference_model import R_SIZES


class Bomb:
    """What runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def folder(tmp_path):
    """The reference model as a checkpoint with safetensors."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**R_SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch):
    monkeypatch.setattr(workload, "_tokenizer", lambda source: None)


def pickled(folder, **more):
    """Put pickled weights beside the others."""
    weights = LlamaForCausalLM.from_pretrained(folder).state_dict()
    torch.save(weights | more, folder / "pytorch_model.bin")


def test_safetensors_are_taken_first(folder, tmp_path):
    pickled(folder, bomb=Bomb(tmp_path / "exploded"))
    loaded = workload.load(ModelSource(str(folder), pickled_weights=True))
    assert loaded.model.num_parameters() == 180_800
    assert not (tmp_path / "exploded").exists()


def test_pickled_weights_need_the_option(folder):
    pickled(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights in safetensors.*add --pickled-weights"):
        workload.load(ModelSource(str(folder)))
    loaded = workload.load(ModelSource(str(folder), pickled_weights=True))
    assert loaded.model.num_parameters() == 180_800
    assert loaded.notes == ("pickled weights were let in, as weights only (--pickled-weights)",)


def test_pickled_weights_run_no_code(folder, tmp_path):
    pickled(folder, bomb=Bomb(tmp_path / "exploded"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        workload.load(ModelSource(str(folder), pickled_weights=True))
    assert not (tmp_path / "exploded").exists()


REMOTE = """
import os
os.mkdir({marker!r})
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_repository_needs_the_option_and_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    marker = tmp_path / "ran"
    (folder / "own.py").write_text(REMOTE.format(marker=str(marker)))
    config = LlamaConfig(**R_SIZES)
    config.auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    config.architectures = ["OwnForCausalLM"]
    config.save_pretrained(folder)
    text = (folder / "config.json").read_text().replace('"llama"', '"own"')
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match="brings its own code; add --trust-remote-code"):
        workload.load(ModelSource(str(folder)))
    assert not marker.exists()
    loaded = workload.load(ModelSource(str(folder), trust_remote_code=True))
    assert marker.exists()
    (note,) = loaded.notes
    assert "code that the model's repository brings was run" in note
    assert "(--trust-remote-code)" in note


ALONE = """
import os, socket, sys
asked = []

def refuse(*args, **kwargs):
    asked.append(args)
    raise OSError("no network here")

socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refuse
socket.getaddrinfo = socket.create_connection = refuse
from lifetrace.cli import main
main(sys.argv[1:], standalone_mode=False)
assert not asked, asked
"""


def test_a_run_asks_for_nothing_from_any_network(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))}
    options = ["--max-new-tokens", "4", "--repeats", "1", "--logprobs", "2", "--ops", "--out", str(tmp_path / "t")]
    command = [sys.executable, "-c", ALONE, "run", *options]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert (tmp_path / "t" / "report.html").is_file()
    assert lifetrace.read_trace(tmp_path / "t").meta["status"] == "complete"


def test_no_source_of_ours_opens_a_connection():
    root = Path(__file__).parents[2]
    sources = [*root.glob("tracer/**/*.py"), *root.glob("hooks/*.py"), *root.glob("analysis/*.py")]
    named = ("import socket", "urllib.request", "http.client", "import requests", "import httpx")
    assert len(sources) > 90
    assert [path for path in sources if any(name in path.read_text(encoding="utf-8") for name in named)] == []
