"""Counts the work of one forward: an operator-level dispatch mode that books to the running module.

Floating-point operations are those of matrix products, convolutions and attention; one
multiply–add is two. Everything else (norms, activations, softmax, copies) has a true 0 here and
is bounded by its bytes. An operator that may hold a product and has no formula is *unknown*:
the module that ran it is uncounted, never guessed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FUSED_ATTENTION = "_scaled_dot_product_"  # attention as one operator, whichever kernel it chooses
SUSPICIOUS = ("mm", "conv", "attention", "dot", "mv", "einsum", "scan", "rnn", "lstm", "gru", "cdist", "fft")


@dataclass
class Product:
    """One product: left [batch, m, k] by right [batch, k, n], or a convolution in the same terms."""

    m: int
    n: int
    k: int
    batch: int
    operand_bytes: int
    attention: bool = False
    pairs_fraction: tuple[int, int] = (1, 1)

    @property
    def flops_dense(self) -> int:
        """2 · batch · m · n · k."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def flops(self) -> int:
        """The same for the query–key pairs alone that causality and the window let through."""
        visible, all_pairs = self.pairs_fraction
        return self.flops_dense * visible // all_pairs


@dataclass
class CallCount:
    """The work of one module call, what it calls included; `own` products exclude that.

    Shapes are of the first tensor given and returned. `unknown` names operators without formula;
    `operators` is how many the call launched itself, where that was counted.
    """

    module: str
    call_index: int
    input_shape: tuple[int, ...] | None = None
    output_shape: tuple[int, ...] | None = None
    dtype: str | None = None
    input_bytes: int = 0
    output_bytes: int = 0
    weights: dict[int, int | None] = field(default_factory=dict)
    own: list[Product] = field(default_factory=list)
    inner: list["CallCount"] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    operators: int = 0

    def operators_inside(self) -> int:
        """Operators launched by this call and all calls inside it."""
        return sum(call.operators for call in self.walk())

    def products(self) -> Iterable[Product]:
        """All products of the call, those of inner calls included."""
        yield from self.own
        for call in self.inner:
            yield from call.products()

    def walk(self) -> Iterable["CallCount"]:
        """The call and all calls inside it."""
        yield self
        for call in self.inner:
            yield from call.walk()

    def unknown_inside(self) -> set[str]:
        """Operators without formula in this call and all calls inside it."""
        return set().union(*(call.unknown for call in self.walk()))

    def weights_inside(self) -> dict[int, int | None]:
        """Bytes read of each distinct weight, None where the values decide how much of it."""
        merged: dict[int, int | None] = {}
        for call in self.walk():
            for key, read in call.weights.items():
                before = merged.get(key, 0)
                merged[key] = None if read is None or before is None else max(before, read)
        return merged


class CountingMode(TorchDispatchMode):
    """Books the products of every operator to the innermost module call that is open.

    Args:
        root: the call that is open from the start.
        weights: the storages of the model's parameters, by their identity, with bytes each.
        visible_pairs: gives, for the open calls, q and the number of keys, how many query–key
            pairs are let through.
        weightless: modules without parameters beside the layers, whose outer products build tables (rotary angles)
            and add nothing up: no matrix products, though some write them so.
    """

    def __init__(
        self,
        root: CallCount,
        weights: dict[int, int],
        visible_pairs: Callable[[list[CallCount], int, int], int],
        weightless: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.weightless = weightless
        self.stack = [root]
        self.weights = weights
        self.visible_pairs = visible_pairs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and book it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        packet = func._overloadpacket
        name = packet.__name__
        self._note_weights(name, args, output)
        products = _products(packet, name, args, kwargs, output)
        if products and products[0].k == 1 and self.stack[-1].module in self.weightless:
            products = []
        if products is None:
            self.stack[-1].unknown.add(str(packet))
        else:
            self.stack[-1].own.extend(products)
            if name.startswith(FUSED_ATTENTION):
                for product in products:
                    self._limit(product, args[0].shape[-2], args[1].shape[-2])
            else:
                self._follow_scores(name, args, output, products)
        return output

    def _note_weights(self, name: str, args: tuple[Any, ...], output: Any) -> None:
        """Note which weights are read; a gather reads rows, which a lookup by value may repeat."""
        for tensor in _tensors(args):
            key = storage_id(tensor)
            size = self.weights.get(key)
            if size is None or _is_view(output, tensor):
                continue
            read: int | None = size
            if name == "embedding":
                read = output.nbytes
            elif name in ("index", "index_select", "gather"):
                # Which experts were chosen is in the values: exact only for a single token, whose
                # choices differ from each other.
                read = output.nbytes if output.shape[0] <= tensor.shape[0] and _single_token(self.stack) else None
            noted = self.stack[-1].weights
            before = noted.get(key, 0)
            noted[key] = None if before is None or read is None else max(before, read)

    def _follow_scores(self, name: str, args: tuple[Any, ...], output: Any, products: list[Product]) -> None:
        """Follow a product through scaling and masking into softmax: then it, and what softmax feeds, are attention."""
        marked = [getattr(tensor, "_lifetrace_scores", None) for tensor in _tensors(args)]
        source = next((mark for mark in marked if mark is not None), None)
        if not isinstance(output, torch.Tensor):
            return
        if products and source is not None and source.softmaxed:
            products[0].attention = True
            products[0].pairs_fraction = source.product.pairs_fraction
        elif products and output.dim() and not any(storage_id(t) in self.weights for t in _tensors(args)):
            output._lifetrace_scores = _Scores(products[0], output.shape[-1])
        elif source is not None and not products:
            if name in ("_softmax", "_safe_softmax", "softmax"):
                if not source.softmaxed:
                    self._limit(source.product, source.product.m, source.keys, args[0])
                source = _Scores(source.product, source.keys, softmaxed=True)
            output._lifetrace_scores = source

    def _limit(self, product: Product, q_len: int, keys: int, scores: torch.Tensor | None = None) -> None:
        """Note how many pairs are let through: read from masked scores that hold values, else as reasoned."""
        product.attention = True
        if scores is not None and scores.device.type != "meta":
            visible = int((scores > torch.finfo(scores.dtype).min / 2).sum())
            product.pairs_fraction = (visible, scores.numel())
        else:
            product.pairs_fraction = (self.visible_pairs(self.stack, q_len, keys), q_len * keys)


@dataclass(frozen=True)
class _Scores:
    product: Product
    keys: int
    softmaxed: bool = False


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, the same for all views of it, on any device."""
    return int(tensor.untyped_storage()._cdata)


def describe(call: CallCount, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Note shapes and bytes at the boundary of a call; masks and caches are no activations."""
    named = {name: value for name, value in kwargs.items() if "mask" not in name and "cache" not in name}
    given = _activations((args, named))
    # An attention map that only an eager implementation returns is no traffic of the boundary.
    returned = [tensor for tensor in _activations(output) if not _is_attention_map(tensor)]
    if given:
        call.input_shape = tuple(given[0].shape)
    if returned:
        call.output_shape = tuple(returned[0].shape)
        call.dtype = str(returned[0].dtype).removeprefix("torch.")
    call.input_bytes = sum(tensor.nbytes for tensor in given)
    call.output_bytes = sum(tensor.nbytes for tensor in returned)


def _is_attention_map(tensor: torch.Tensor) -> bool:
    """Whether a tensor is softmax of scores; those of a product that came to no softmax are none, as of experts."""
    scores = getattr(tensor, "_lifetrace_scores", None)
    return scores is not None and scores.softmaxed


def causal_pairs(q_len: int, before: int, window: int | None = None, chunk: int | None = None) -> int:
    """Query–key pairs that causality lets through: position p sees p + 1 keys, at most its window.

    In chunked attention a position sees its own chunk alone.

    Args:
        q_len: positions computed.
        before: positions cached before them.
        window: keys a position sees at most, itself included.
        chunk: length of a chunk.
    """
    if window is None and chunk is None:
        return q_len * before + q_len * (q_len + 1) // 2
    positions = range(before, before + q_len)
    if chunk is not None:
        return sum(position % chunk + 1 for position in positions)
    assert window is not None
    return sum(min(position + 1, window) for position in positions)


def _products(packet: Any, name: str, args: Any, kwargs: Any, output: Any) -> list[Product] | None:
    """The products of one operator: [] for none, None where it may hold some and has no formula."""
    if name in ("mm", "_scaled_mm", "_int_mm"):
        return [_product(args[0], args[1], output)]
    if name in ("addmm", "baddbmm", "addbmm"):
        return [_product(args[1], args[2], output)]
    if name == "bmm":
        return [_product(args[0], args[1], output)]
    if name in ("mv", "addmv"):
        matrix, vector = args[-2:]
        return [Product(matrix.shape[0], 1, matrix.shape[1], 1, _bytes(matrix, vector, output))]
    if name in ("dot", "vdot"):
        return [Product(1, 1, args[0].shape[0], 1, _bytes(args[0], args[1], output))]
    if name in ("convolution", "_convolution", "mkldnn_convolution"):
        return [_convolution(args, output)]
    if name == "_grouped_mm":
        left, right = args[0], args[1]
        return [Product(left.shape[0], right.shape[-1], left.shape[-1], 1, _bytes(left, right, output))]
    if name.startswith(FUSED_ATTENTION):
        return _attention(*args[:3])
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=output)
        return [Product(1, 1, flops // 2, 1, _bytes(*_tensors(args), output))] if flops else []
    namespace = str(packet).partition(".")[0]
    if namespace not in ("aten", "prims", "prim"):
        return None
    return None if any(word in name for word in SUSPICIOUS) and "_convert" not in name and "comm" not in name else []


def _product(left: torch.Tensor, right: torch.Tensor, output: torch.Tensor) -> Product:
    batch = left.shape[0] if left.dim() == 3 else 1
    return Product(left.shape[-2], right.shape[-1], left.shape[-1], batch, _bytes(left, right, output))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[Product]:
    """Scores of queries [b, h, q, d] with keys [b, h', k, d], and the weighted sum of values [b, h', k, v]."""
    batch, q_len, keys = query.shape[:-2].numel(), query.shape[-2], key.shape[-2]
    return [
        Product(q_len, keys, query.shape[-1], batch, _bytes(query, key)),
        Product(q_len, value.shape[-1], keys, batch, _bytes(value)),
    ]


def _convolution(args: Any, output: torch.Tensor) -> Product:
    """Each output element sums over the weight's input channels and kernel."""
    source, weight = args[0], args[1]
    transposed = bool(args[6]) if len(args) > 6 else False
    per_output = math.prod(weight.shape[1:])
    if transposed:
        return Product(source.numel(), 1, per_output, 1, _bytes(source, weight, output))
    return Product(output.numel(), 1, per_output, 1, _bytes(source, weight, output))


def _bytes(*tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(tensors))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _activations(tree: Any) -> list[torch.Tensor]:
    """Tensors of a call's arguments or result, each once; a cache in a result is opaque and skipped."""
    return list({id(tensor): tensor for tensor in _tensors(tree)}.values())


def _is_view(output: Any, tensor: torch.Tensor) -> bool:
    """Whether the operator only looked at the tensor in another shape."""
    return isinstance(output, torch.Tensor) and storage_id(output) == storage_id(tensor)


def _single_token(stack: list[CallCount]) -> bool:
    shape = stack[-1].input_shape
    return shape is not None and math.prod(shape[:-1]) == 1


@dataclass(frozen=True)
class ForwardCount:
    """The work of one forward: the root's call tree."""

    root: CallCount

    def flops_dense(self) -> int:
        """The FLOPs of all products of the forward."""
        return sum(product.flops_dense for product in self.root.products())


class Booking(Protocol):
    """What books operators to the innermost of the calls that are open."""

    stack: list[CallCount]


class CallTree:
    """Builds the tree of module calls while a forward runs under a mode that books to them."""

    def __init__(self, names: dict[nn.Module, str], mode: Booking) -> None:
        self.names = names
        self.mode = mode
        self.seen: Counter[str] = Counter()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module's forward begins."""
        name = self.names[module]
        call = CallCount(name, self.seen[name])
        self.seen[name] += 1
        given = _activations((args, kwargs))
        call.input_shape = tuple(given[0].shape) if given else None
        self.mode.stack[-1].inner.append(call)
        self.mode.stack.append(call)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """It returned."""
        describe(self.mode.stack.pop(), args, kwargs, output)
