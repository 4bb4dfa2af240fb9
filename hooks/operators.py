"""Counts the operators that a forward launches, as the implementation that really runs launches them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .counting import CallCount


class OperatorMode(TorchDispatchMode):
    """Books every operator that does work to the innermost module call that is open; views do none."""

    def __init__(self, root: CallCount) -> None:
        super().__init__()
        self.stack = [root]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it."""
        if not (func.is_view or func is torch.ops.aten._unsafe_view.default):
            self.stack[-1].operators += 1
        return func(*args, **(kwargs or {}))


def count_operators(work: Callable[[], object]) -> int:
    """Operators that some work launches, views excluded."""
    root = CallCount("", 0)
    with OperatorMode(root):
        work()
    return root.operators
