"""Weights that are brought to where they are used, call by call: what accelerate's hooks do for an offloaded module."""

from typing import Any

from torch import nn


def weight_loader(module: nn.Module) -> Any:
    """Return the hook whose `pre_forward` brings a module's weights from the CPU or the disk; None without one."""
    hook = getattr(module, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        if (releases(one) or _moves_all(one)) and loaded_bytes(module, one):
            return one
    return None


def releases(loader: Any) -> bool:
    """Whether a loader lets go of the weights after each call."""
    return getattr(loader, "offload", False) is True


def loaded_bytes(module: nn.Module, loader: Any) -> int:
    """Bytes that a loader brings at each call of its module."""
    deep = _moves_all(loader) or bool(getattr(loader, "place_submodules", False))
    tensors = [*module.parameters(recurse=deep)]
    if _moves_all(loader) or getattr(loader, "offload_buffers", False):
        tensors += module.buffers(recurse=deep)
    return sum(tensor.nbytes for tensor in tensors)


def loads_by_module(model: nn.Module) -> dict[str, int]:
    """Bytes that are brought at each call, by the name of the module."""
    loaders = ((name, module, weight_loader(module)) for name, module in model.named_modules())
    return {name: loaded_bytes(module, loader) for name, module, loader in loaders if loader is not None}


def _moves_all(hook: Any) -> bool:
    """Whether the hook moves its whole module, as accelerate's `CpuOffload` does."""
    return type(hook).__name__ == "CpuOffload"
