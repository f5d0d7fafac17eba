"""Counts what a device is asked to do: kernels, matrix products, and waits of the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result the host has to wait for.
WAITING = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "equal",
    "is_nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
#: What is asked of the host alone, or only of its allocator.
NO_KERNEL = {
    "_unsafe_view",
    "promote_types",
    "_record_function_enter_new",
    "_record_function_exit",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
}


class Operations(TorchDispatchMode):
    """Counts the ATen operations inside.

    ``kernels`` are those that compute something, without products of matrices, which are ``products``
    by the shape of their result; views and allocations are neither. ``waits`` make the host wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reads = _Reads(self)
        self.kernels: Counter[str] = Counter()
        self.products: Counter[tuple[int, ...]] = Counter()
        self.waits: Counter[str] = Counter()
        self.all = 0

    def __enter__(self) -> Operations:
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in WAITING:
            self.waits[name] += 1
        elif name == "_to_copy" and kwargs.get("device") is not None:
            self.waits["copy to another device"] += 1
        elif name == "index" and any(_is_mask(index) for index in args[1]):
            self.waits["index by a mask"] += 1
        result = func(*args, **kwargs)
        self.all += 1
        if name in PRODUCTS:
            self.products[tuple(result.shape)] += 1
        elif not func.is_view and name not in NO_KERNEL | WAITING:
            self.kernels[name] += 1
        return result


class _Reads(TorchFunctionMode):
    """Counts what leaves a tensor of the CPU without an operation."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "cpu"):
            self.operations.waits[name] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
