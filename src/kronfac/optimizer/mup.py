"""Learning rates and initial weights that keep feature learning the same at every width (μP).

Ishikawa & Karakida (2024), On the parameterization of second-order optimization effective towards the
infinite width; for SGD, Yang & Hu (2021). What a layer of width M does to features is derived as follows,
with ``gᵢ``, ``gₒ``, ``g_b`` the growth of its input, its output, and of the number of its blocks:

- activations are of order 1, so the large eigenvalues of A grow as ``gᵢ``;
- if the output grows, its gradients have entries of order ``1/(g_b gₒ)``, and the large eigenvalues of a
  block's G are of order ``gₒ/(g_b gₒ)²``; if it does not, both are of order 1;
- a step ``lr·G^-e_G V A^-e_A`` has to have entries of order ``1/gᵢ``, to change ``h = W a`` by order 1.

Hence ``lr ∝ gₒ^(1-e_G) · g_b^(1-2e_G) · gᵢ^(e_A-1)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.layers import Layer, find_layers
from kronfac.layers.selection import Selection, plain_name, unwrap
from kronfac.options.config import Pattern, as_patterns, check_non_negative, is_real
from kronfac.step.validation import check_module

#: By method, the exponents ``(e_G, e_A)`` of ``G^-e_G V A^-e_A``.
EXPONENTS = {"kfac": (1.0, 1.0), "shampoo": (0.5, 0.5), "sgd": (0.0, 0.0)}

_UNLIKE = "base has nothing like {!r} of the model; build both by the same function, at two widths."


@dataclass(frozen=True)
class Growth:
    """How many times wider a parameter is than in the base model."""

    outputs: float
    inputs: float
    blocks: float = 1.0

    def rate(self, exponents: tuple[float, float]) -> float:
        """What to multiply the learning rate by."""
        e_out, e_in = exponents
        return float(
            self.outputs ** (1 - e_out) * self.blocks ** (1 - 2 * e_out) * self.inputs ** (e_in - 1)
        )

    @property
    def initial(self) -> float:
        """What to multiply initial weights by: ``gᵢ^-½``, and ``gᵢ⁻¹`` if the output does not grow."""
        grows = self.outputs * self.blocks != 1
        return float(self.inputs ** (-0.5 if grows else -1.0))


def mup_param_groups(
    model: nn.Module,
    base: nn.Module,
    *,
    lr: float,
    method: str | tuple[float, float] = "kfac",
    include: Pattern | Sequence[Pattern] | None = None,
    exclude: Pattern | Sequence[Pattern] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Groups for the base optimizer with rates that transfer from ``base`` to a wider ``model`` (μP).

    ``base`` is the same architecture at the width where ``lr`` was tuned. The rates of its input, hidden
    and output layers are multiplied by ``M^-c``, M the growth of the width: c = (0, 0, 0) for K-FAC,
    (-½, 0, ½) for Shampoo, (-1, 0, 1) for SGD (Ishikawa & Karakida 2024). Initial weights have to fit,
    see :func:`mup_init_`. So does K-FAC's damping: give ``damping=kronfac.Relative(1e-3, to="trace")``
    with ``rescale=None``.

    Args:
        model: the model to train.
        base: the same at the width where ``lr`` was tuned; it is only looked at.
        lr: the learning rate at that width.
        method: ``"kfac"``, ``"shampoo"`` (with its power of 1/4), ``"sgd"``, or the exponents of a method
            ``G^-e_G V A^-e_A`` as a pair (e_G, e_A), for example (0, 1) for ``fisher="forward"``.
        include: as given to the optimizer; what it does not precondition gets the rates of SGD.
        exclude: likewise.
        options: further options of all groups, for example ``weight_decay=1e-4``.
    """
    check_non_negative("lr", lr)
    exponents = _exponents_of(method)
    growths = _growths(model, base)
    selection = Selection(
        unwrap(model), as_patterns(include, "include"), as_patterns(exclude, "exclude")
    )
    factors = {p: growth.rate(EXPONENTS["sgd"]) for p, growth in growths.items()}
    for layer in selection.layers:
        if method == "sgd" or (layer.unit_wise and method == "shampoo"):
            continue  # Shampoo leaves norms to the base
        factors |= dict.fromkeys(layer.parameters, growths[layer.weight].rate(exponents))
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(factors[parameter], []).append(parameter)
    return [{"params": params, "lr": lr * factor, **options} for factor, params in groups.items()]


@torch.no_grad()
def mup_init_(model: nn.Module, base: nn.Module) -> None:
    """Scale initial weights, in place, to what μP needs: those of ``base`` times ``M^-b``.

    With b = (0, ½, 1) for input, hidden and output layers; biases and norms are as in ``base``. Each
    parameter is multiplied by a number, so that its root mean square becomes that of ``base`` times
    ``M^-b``; what is zero stays zero.
    """
    originals = {plain_name(n): p for n, p in unwrap(base).named_parameters()}
    names = {p: plain_name(n) for n, p in unwrap(model).named_parameters()}
    for parameter, growth in _growths(model, base).items():
        target = _root_mean_square(originals[names[parameter]]) * growth.initial
        own = _root_mean_square(parameter)
        if target > 0 and own > 0:
            parameter.mul_(target / own)


def _root_mean_square(values: Tensor) -> float:
    wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    return float(wide.square().mean().sqrt())


def _exponents_of(method: str | tuple[float, float]) -> tuple[float, float]:
    if isinstance(method, str) and method in EXPONENTS:
        return EXPONENTS[method]
    if isinstance(method, tuple) and len(method) == 2 and all(map(is_real, method)):
        return method
    raise ValueError(
        f"method={method!r} is not supported; choose 'kfac', 'shampoo', 'sgd' or exponents "
        "(e_G, e_A), for example (0.0, 1.0)."
    )


def _growths(model: nn.Module, base: nn.Module) -> dict[nn.Parameter, Growth]:
    """How each parameter of a model has grown."""
    check_module(model)
    check_module(base)
    model, base = unwrap(model), unwrap(base)
    originals = {plain_name(name): p for name, p in base.named_parameters()}
    found: dict[nn.Parameter, Growth] = {}
    for name, parameter in model.named_parameters():
        original = originals.get(plain_name(name))
        if original is None or original.dim() != parameter.dim():
            raise ValueError(_UNLIKE.format(plain_name(name)))
        found[parameter] = _by_shape(tuple(parameter.shape), tuple(original.shape))
    known: dict[nn.Parameter, Growth] = {}
    base_layers = {layer.name: layer for layer in _layers(base)}
    for layer in _layers(model):
        if layer.name not in base_layers:
            raise ValueError(_UNLIKE.format(layer.name))
        growth = _of_layer(layer, base_layers[layer.name])
        if known.setdefault(layer.weight, growth) != growth:
            raise ValueError(
                f"the weight of layer {layer.name!r} is used in two ways, as an embedding and as a head "
                "perhaps, which need different rates; untie them."
            )
    return found | known


def _layers(model: nn.Module) -> list[Layer]:
    """Every layer whose weight is a known matrix, whether or not it is preconditioned."""
    found: list[Layer] = []
    for name, module in model.named_modules():
        layers = find_layers(plain_name(name), module)
        found += [] if isinstance(layers, str) else layers
    return found


def _by_shape(shape: tuple[int, ...], base: tuple[int, ...]) -> Growth:
    """Vectors scale or shift features one by one; the first dimension of others is the output's."""
    ratios = [new / old for new, old in zip(shape, base, strict=True)]
    if len(ratios) < 2:
        return Growth(1.0, 1.0, blocks=math.prod(ratios))
    return Growth(ratios[0], math.prod(ratios[1:]))


def _of_layer(layer: Layer, base: Layer) -> Growth:
    new, old = _sides(layer), _sides(base)
    outputs, inputs, blocks = (a / b for a, b in zip(new, old, strict=True))
    return Growth(outputs, inputs, blocks)


def _sides(layer: Layer) -> tuple[int, int, int]:
    """Rows and columns of the weight as a matrix, and how many blocks it has."""
    *blocks, d_out, d_in = layer.matrix_shape
    return d_out, d_in - layer.bias_trains, math.prod(blocks)
