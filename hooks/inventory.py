"""What a model holds: the parameters of each module, counted once, with ties and where they lie."""

from dataclasses import dataclass

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
    rows = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        shared = [owners[id(parameter)] for parameter in own if id(parameter) in owners]
        if len(shared) < len(own):  # only a part of it is counted elsewhere: a bias of its own, say
            own = [parameter for parameter in own if id(parameter) not in owners]
            shared = []
        for parameter in own:
            owners.setdefault(id(parameter), name)
        local = [_local(parameter) for parameter in own]
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


def parameter_count(rows: list[ModuleRow]) -> int:
    """The model's parameters, shared ones once."""
    return sum(row.parameters for row in rows if row.tied_to is None)


def logical_count(module: nn.Module, parameter: nn.Parameter) -> int:
    """How many numbers a parameter stands for: a packed matrix counts its unpacked elements."""
    quant_state = getattr(parameter, "quant_state", None)
    shape = getattr(quant_state, "shape", None)
    if shape is not None:
        count = 1
        for size in shape:
            count *= size
        return count
    return parameter.numel()


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """Return the local shard of a distributed parameter, the parameter itself otherwise."""
    to_local = getattr(parameter, "to_local", None)
    return to_local() if to_local is not None else parameter


def _place(name: str, lifecycle: Lifecycle) -> Place:
    """The module's own place, or that of the nearest module around it that has one."""
    while name not in lifecycle.places and name:
        name = name.rpartition(".")[0]
    return lifecycle.places.get(name, Place("other"))
