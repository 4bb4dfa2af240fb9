"""All that tracing could leave behind: in a model, its class, torch, transformers, and the interpreter."""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import GenerationMixin

from lifetrace import session
from lifetrace.hooks import generation

MODULE_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
)  # fmt: skip


def left_behind(model: Any) -> list[Any]:
    """A picture of it; two that are equal mean that nothing was left between them."""
    return [*_of_model(model), *_of_process()]


def _of_model(model: Any) -> Iterator[Any]:
    for name, module in model.named_modules():
        yield name, type(module), sorted(vars(module))
        yield name, module.training, {key: id(value) for key, value in vars(module).items() if callable(value)}
        for kind in MODULE_HOOKS:
            yield name, kind, [(number, id(hook)) for number, hook in getattr(module, kind).items()]
    for cls in type(model).__mro__:
        yield cls, {key: id(value) for key, value in vars(cls).items() if callable(value) or key == "forward"}
    yield [(name, id(value)) for name, value in sorted(vars(model.generation_config).items()) if callable(value)]


def _of_process() -> Iterator[Any]:
    yield id(GenerationMixin.generate)
    for kind in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        yield kind, list(getattr(torch_module, kind))
    yield [str(mode) for mode in _get_current_dispatch_mode_stack()]
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    yield torch.are_deterministic_algorithms_enabled(), str(torch.get_default_device())
    yield [id(finder) for finder in sys.meta_path], [str(one) for one in warnings.filters]
    yield dict(os.environ), sys.gettrace(), sys.getprofile(), threading.active_count()
    yield logging.getLogger().handlers[:], logging.getLogger("transformers").level, id(sys.excepthook)
    yield generation._recorders, generation._patched, session.automatic
