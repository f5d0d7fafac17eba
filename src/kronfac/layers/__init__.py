"""Module types that can be preconditioned, and the reasons why others cannot."""

from kronfac.layers.layer import Layer
from kronfac.layers.linear import LinearLayer, TransposedLinearLayer
from kronfac.layers.registry import find_layers, register_layer
from kronfac.layers.rows import DenseRows, Rows

__all__ = [
    "DenseRows",
    "Layer",
    "LinearLayer",
    "Rows",
    "TransposedLinearLayer",
    "find_layers",
    "register_layer",
]
