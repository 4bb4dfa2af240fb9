"""Models and traces that several tests share; torch runs on one thread, so that tests do not fight for cores."""

import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from reference_model import R_SIZES

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()


def pytest_configure():
    """Give the tests ceilings of their own: none of them should measure this machine, or leave anything on it."""
    os.environ["LIFETRACE_CACHE"] = tempfile.mkdtemp(prefix="lifetrace-tests-")
    from fake_device import fake_ceilings

    from lifetrace import calibrate

    calibrate.store(replace(fake_ceilings(), device=calibrate.device_key(torch.device("cpu"))))


def pytest_unconfigure():
    shutil.rmtree(os.environ["LIFETRACE_CACHE"], ignore_errors=True)


@pytest.fixture
def model_r():
    """The reference model R of the documentation: 180,800 parameters."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**R_SIZES)).eval()


@pytest.fixture
def prompt_12():
    """Twelve prompt tokens."""
    return torch.arange(3, 15)[None]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """An ordinary checkpoint of SmolLM2-135M-Instruct."""
    from smollm2 import smollm2_checkpoint

    return smollm2_checkpoint()
