"""Finds the lifecycle in a model: embedding, decoder layers, final norm, head, by structure alone.

No architecture is named here. The input and output embeddings are what the model itself says
they are; the decoder layers are the module list of the text model that its config counts, or
the largest one; a norm is a module whose own parameters are all vectors and whose name or
class says so. What stands beside the chain from the root down to the layers is a stage of its
own; what stands inside a layer is a part of it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lifetrace.errors import ModelError

NORM = re.compile(r"norm|(^|_)ln(_|\d|$)", re.IGNORECASE)
ATTENTION = re.compile(r"attention|attn|mixer|mamba|ssm|recurrent|rwkv|timemix|time_mix|retention|conv", re.IGNORECASE)
ROUTER = re.compile(r"router|gate$|gating", re.IGNORECASE)
EXPERTS = re.compile(r"experts?$", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where a module stands: its stage, its layer, and its part where structure alone tells it.

    `matrix` says that it holds a weight matrix of its own; parts inside attention and MLP are
    named from these by the order in which they run.
    """

    stage: str
    layer: int | None = None
    part: str | None = None
    matrix: bool = False


@dataclass(frozen=True)
class Lifecycle:
    """The stages of one model by qualified name, in the order of registration."""

    embed: str | None
    layers: tuple[str, ...]
    head: str | None
    places: dict[str, Place]
    notes: tuple[str, ...] = ()


def find(model: nn.Module) -> Lifecycle:
    """Find the lifecycle of a causal language model.

    Raises:
        ModelError: when it is an encoder–decoder, or no module list looks like decoder layers.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder–decoder; lifetrace traces causal language models "
            "(decoder only). Load a decoder-only model, such as one that AutoModelForCausalLM gives."
        )
    names = {module: name for name, module in model.named_modules()}
    embedding, head = _embeddings(model)
    layer_lists = _layer_lists(model, embedding, config)
    layers = {layer: index for index, layer in enumerate(layer for list_ in layer_lists for layer in list_)}
    chain = set().union(
        *(_ancestors(model, target) for target in (*layer_lists, embedding, head) if target is not None)
    )

    heads = set(head.children()) if head is not None and is_container(head) else {head}
    places: dict[str, Place] = {}
    after_layers = False
    for module in _beside_chain(model, chain, layers):
        if module in layers:
            after_layers = True
            _place_layer(places, names, module, layers[module])
            continue
        for part in _opened(names[module], module) if after_layers else (module,):
            stage = _outer_stage(names[part], part, embedding, heads, after_layers)
            _place_all(places, names, part, stage)
    notes = () if head is not None else ("no output embedding was found: the head is part of `other`",)
    return Lifecycle(
        embed=names.get(embedding) if embedding is not None else None,
        layers=tuple(names[layer] for layer in layers),
        head=names.get(head) if head is not None else None,
        places=places,
        notes=notes,
    )


def is_norm(name: str, module: nn.Module) -> bool:
    """A norm: named like one (by itself or its class), with vectors for parameters, or none."""
    named = NORM.search(name.rsplit(".", 1)[-1]) or NORM.search(type(module).__name__)
    return bool(named) and all(parameter.dim() <= 1 for parameter in module.parameters())


def has_matrix(module: nn.Module) -> bool:
    """Whether a parameter of the module itself has two dimensions or more, packed ones included."""
    own = list(module.parameters(recurse=False))
    return any(parameter.dim() >= 2 for parameter in own) or hasattr(module, "in_features")


def _embeddings(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return what the model names as its input and output embeddings, each None where it names none."""
    found: list[nn.Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(model, getter)()
        except (AttributeError, NotImplementedError):
            module = None
        found.append(module if isinstance(module, nn.Module) else None)
    return found[0], found[1]


def _layer_lists(model: nn.Module, embedding: nn.Module | None, config: object) -> list[nn.ModuleList]:
    """Choose the lists of decoder layers among the outermost module lists of the text model.

    The best is one that the text model's own config governs (a vision tower has another), that is
    as long as it says, and that stands beside the embedding; the largest of those. Other lists of
    the same kind of layer run in the same stream, unless what they stand in embeds tokens by a
    table of its own: then it is a model inside the model.
    """
    candidates = [module for module in _outermost_lists(model) if any(True for _ in module.parameters())]
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} holds no list of decoder layers; lifetrace traces decoder-only "
            "transformers and their recurrent relatives as AutoModelForCausalLM gives them."
        )
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    depth = getattr(text_config, "num_hidden_layers", None)
    text_tower = _parent(model, embedding) if embedding is not None else model

    def rank(candidate: nn.ModuleList) -> tuple[bool, bool, bool, int]:
        governed = type(_config_of(model, candidate)) is type(text_config)
        inside = any(module is candidate for module in text_tower.modules())
        return governed, len(candidate) == depth, inside, sum(parameter.numel() for parameter in candidate.parameters())

    best = max(candidates, key=rank)
    kinds = {type(layer) for layer in best}

    def belongs(candidate: nn.ModuleList) -> bool:
        embeds = (child for child in _parent(model, candidate).children() if isinstance(child, nn.Embedding))
        return kinds >= {type(layer) for layer in candidate} and all(child is embedding for child in embeds)

    return [candidate for candidate in candidates if candidate is best or belongs(candidate)]


def _config_of(root: nn.Module, target: nn.Module) -> object:
    """The config of the nearest module around the target that has one."""
    around = _ancestors(root, target)
    owners = [module for module in root.modules() if module in around and getattr(module, "config", None) is not None]
    return owners[-1].config if owners else None  # the innermost comes last


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child):
            yield child
        else:
            yield from _outermost_lists(child)


def _parent(root: nn.Module, target: nn.Module) -> nn.Module:
    return next((module for module in root.modules() if any(child is target for child in module.children())), root)


def _ancestors(root: nn.Module, target: nn.Module) -> set[nn.Module]:
    """Return all modules that contain the target, the root included, the target not."""
    return {module for module in root.modules() if module is not target and any(m is target for m in module.modules())}


def _beside_chain(root: nn.Module, chain: set[nn.Module], layers: dict[nn.Module, int]) -> Iterator[nn.Module]:
    """Yield the layers and all that stands beside the chain, in order; a list is no module that runs."""
    for child in root.children():
        if child not in layers and (child in chain or is_container(child)):
            yield from _beside_chain(child, chain, layers)
        else:
            yield child


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and is never called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _opened(name: str, module: nn.Module) -> tuple[nn.Module, ...]:
    """What a transform before the head consists of, if one norm is among it; any other module is itself."""
    children = dict(module.named_children())
    norms = [child for child_name, child in children.items() if is_norm(child_name, child)]
    owns = any(True for _ in module.parameters(recurse=False))
    if len(norms) != 1 or owns or is_norm(name, module) or any(map(is_container, children.values())):
        return (module,)
    return tuple(children.values())


def _outer_stage(
    name: str, module: nn.Module, embedding: nn.Module | None, heads: set[nn.Module | None], after_layers: bool
) -> Place:
    if module in heads:
        return Place("lm_head", matrix=True)
    if module is embedding or isinstance(module, nn.Embedding):
        return Place("embed", matrix=True)
    if after_layers and is_norm(name, module):
        return Place("final_norm")
    return Place("other", part="norm" if is_norm(name, module) else None, matrix=has_matrix(module))


def _place_layer(places: dict[str, Place], names: dict[nn.Module, str], layer: nn.Module, index: int) -> None:
    places[names[layer]] = Place("layer", index)
    for child_name, child in _running_children(layer):
        part = _layer_part(child_name, child)
        places[names[child]] = Place("layer", index, part, has_matrix(child))
        for name, module in child.named_modules():
            if module is not child and not is_container(module):
                places[names[module]] = Place("layer", index, _inner_part(name, module), has_matrix(module))


def _running_children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module's children by name, in place of a list what it holds."""
    for name, child in module.named_children():
        if is_container(child):
            yield from _running_children(child, f"{prefix}{name}.")
        else:
            yield prefix + name, child


def _layer_part(name: str, module: nn.Module) -> str | None:
    """Name a direct child of a layer: norm, attention (or what mixes positions in its place), or mlp."""
    if is_norm(name, module):
        return "norm"
    if not any(True for _ in module.parameters()):
        return None
    if ATTENTION.search(name) or ATTENTION.search(type(module).__name__):
        return "attention"
    return "mlp"


def _inner_part(name: str, module: nn.Module) -> str | None:
    last = name.rsplit(".", 1)[-1]
    if is_norm(name, module):
        return "norm"
    if EXPERTS.search(last):
        return "experts"
    return "router" if ROUTER.search(last) and "gate_proj" not in last else None


def _place_all(places: dict[str, Place], names: dict[nn.Module, str], module: nn.Module, place: Place) -> None:
    for inner in module.modules():
        if is_container(inner):
            continue
        own = place if inner is module else Place(place.stage, None, place.part, has_matrix(inner))
        places.setdefault(names[inner], own)
