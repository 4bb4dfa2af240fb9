"""What a model holds: the parameters of each module, counted once, with ties and where they lie."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from .stages import Lifecycle, Place


@dataclass(frozen=True)
class ModuleRow:
    """One module that holds parameters of its own; `weight_bytes` are resident on this process."""

    module: str
    class_name: str
    place: Place
    parameters: int
    weight_bytes: int
    dtype: str
    device: str
    tied_to: str | None
    offloaded: bool


def inventory(model: nn.Module, lifecycle: Lifecycle) -> list[ModuleRow]:
    """List the modules with parameters of their own, in registration order.

    A parameter that two modules share counts at the first. A module that shares all of its own
    says so in `tied_to` and still shows its size, so that sums leave out rows where `tied_to` is
    set; one that shares some of them shows the rest.
    """
    owners: dict[int, str] = {}
    one_with = _offloaded_ties(model)
    rows = []
    for name, module in model.named_modules():
        own = own_weights(module)
        if not own:
            continue
        identity = {id(parameter): one_with.get(id(parameter), id(parameter)) for parameter in own}
        shared = [owners[identity[id(parameter)]] for parameter in own if identity[id(parameter)] in owners]
        if len(shared) < len(own):  # only a part of it is counted elsewhere: a bias of its own, say
            own = [parameter for parameter in own if identity[id(parameter)] not in owners]
            shared = []
        for parameter in own:
            owners.setdefault(identity[id(parameter)], name)
        local = [local_part(parameter) for parameter in own]
        rows.append(
            ModuleRow(
                module=name,
                class_name=type(module).__name__,
                place=_place(name, lifecycle),
                parameters=sum(logical_count(module, parameter) for parameter in own),
                weight_bytes=sum(parameter.nbytes for parameter in local if parameter.device.type != "meta"),
                dtype=str(own[0].dtype).removeprefix("torch."),
                device=str(own[0].device),
                tied_to=shared[0] if shared else None,
                offloaded=own[0].device.type == "meta" and hasattr(module, "_hf_hook"),
            )
        )
    return rows


def _offloaded_ties(model: nn.Module) -> dict[int, int]:
    """Which offloaded parameter is one with which other, by identity, as transformers names them.

    accelerate puts a new empty tensor into an offloaded module after each call, so that what is shared is no
    longer one object.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    said = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = [(named[name], named[source]) for name, source in said.items() if name in named and source in named]
    return {id(tied): id(source) for tied, source in pairs if tied.device.type == "meta" and tied is not source}


def parameter_count(rows: list[ModuleRow]) -> int:
    """The model's parameters, shared ones once."""
    return sum(row.parameters for row in rows if row.tied_to is None)


def own_weights(module: nn.Module) -> list[torch.Tensor]:
    """The parameters of a module itself; of a packed matrix that keeps its weight in buffers, those."""
    own: list[torch.Tensor] = list(module.parameters(recurse=False))
    if own and not _is_matrix_module(module):
        return own
    packed = [buffer for buffer in module.buffers(recurse=False) if buffer.dim() > 1]
    return own + packed if _is_matrix_module(module) and not any(t.dim() > 1 for t in own) else own


def expert_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of one expert, by the module that holds the stacked weights [experts, …] of all of them."""
    found = {}
    for name, module in model.named_modules():
        stacked = [local_part(p) for p in module.parameters(recurse=False) if p.dim() > 2]
        if stacked and not isinstance(module, nn.modules.conv._ConvNd):
            found[name] = sum(parameter.nbytes // parameter.shape[0] for parameter in stacked)
    return found


def logical_count(module: nn.Module, weight: torch.Tensor) -> int:
    """How many numbers a weight stands for: a packed matrix counts its unpacked elements.

    A packed matrix is of integers, several numbers in each; what it stands for is the product of
    the module's features. Its scales and zero points stand for nothing of their own.
    """
    shape = getattr(getattr(weight, "quant_state", None), "shape", None)
    if shape is not None:
        return math.prod(shape)
    packed = [t for t in own_weights(module) if t.dim() > 1 and not t.is_floating_point()]
    if not packed or not _is_matrix_module(module):
        return weight.numel()
    if weight is packed[0]:
        return int(module.in_features) * int(module.out_features)
    return weight.numel() if weight.dim() == 1 and weight.numel() == module.out_features else 0


def _is_matrix_module(module: nn.Module) -> bool:
    features = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(count, int) for count in features)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a parameter that several share, the parameter itself otherwise."""
    to_local = getattr(parameter, "to_local", None)
    return to_local() if to_local is not None else parameter


def is_shared_out(model: nn.Module) -> bool:
    """Whether several processes hold the model's parameters in parts: a forward of one waits for the others."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def _place(name: str, lifecycle: Lifecycle) -> Place:
    """The module's own place, or that of the nearest module around it that has one."""
    while name not in lifecycle.places and name:
        name = name.rpartition(".")[0]
    return lifecycle.places.get(name, Place("other"))
