"""Layers whose weights are Kronecker products: compressed linear and recurrent layers, and adapters."""

from kronfac.nn.adapters import KronAAdapter, attach_adapters, merge_adapters
from kronfac.nn.compress import compress
from kronfac.nn.linear import KroneckerLinear
from kronfac.nn.nearest import nearest_kronecker, nearest_kronecker_sum
from kronfac.nn.recurrent import KroneckerGRU, KroneckerLSTM, KroneckerRNN

__all__ = [
    "KronAAdapter",
    "KroneckerGRU",
    "KroneckerLSTM",
    "KroneckerLinear",
    "KroneckerRNN",
    "attach_adapters",
    "compress",
    "merge_adapters",
    "nearest_kronecker",
    "nearest_kronecker_sum",
]
