"""A slow, obvious float64 reference for K-FAC on one layer. It shares no code with the library.

Words and shapes used throughout:

- N samples, S shared positions, T loss terms per sample, J groups of a convolution, d_in and d_out
  the sides of the layer's matrix. A bias is one more input feature, constant 1 and last.
- Rows are `a: [N, S, d_in]` and `g: [N, S, d_out]`; a grouped convolution adds a leading J.
- The matrix of a layer is `V = [weight.flatten(1) | bias]`, flattened row by row, so its curvature
  is `kron(G, A)`. A grouped convolution has one such matrix per group.
- `loss_average` is the divisor of the loss: `loss = Σ terms / divisor`. `"batch"` divides by N,
  `"token"` by the number of unmasked terms, `None` by one (a sum loss), a number by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sharing = Literal["expand", "reduce"]
Likelihood = Literal["categorical", "bernoulli", "gaussian"]
LossAverage = Literal["batch", "token"] | float | None


# --- rows ------------------------------------------------------------------------------------


@dataclass
class LayerCall:
    """One use of a layer: its input `x` and its output `z`, which is still in the graph."""

    x: Tensor
    z: Tensor


def run_layer(model: nn.Module, layer: nn.Module, *inputs: Any) -> tuple[Any, list[LayerCall]]:
    """Run the model; return its outputs and every call of `layer`, in order."""
    calls: list[LayerCall] = []

    def remember(_: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> Tensor:
        calls.append(LayerCall(args[0].detach().clone(), z))
        return z.clone()  # an in-place activation must not overwrite the z that is remembered

    handle = layer.register_forward_hook(remember)
    try:
        outputs = model(*inputs)
    finally:
        handle.remove()
    return outputs, calls


def layer_rows(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Canonical rows of one layer call from its input and the gradient of its output.

    Linear: `x [N, ..., in]`, `g [N, ..., out]`. Convolution: `x [N, C, ...]`, `g [N, O, ...]`.
    Returns `a [N, S, d_in]`, `g [N, S, d_out]`, both with a leading J if `groups > 1`.
    Several uses of one layer are further positions: concatenate their rows along dim -2.
    """
    x, g = x.detach().double(), g.detach().double()
    if isinstance(layer, nn.Linear):
        a, g = _linear_rows(x), _linear_rows(g)
    elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        a, g = _conv_rows(layer, x, g)
    else:
        raise ValueError(f"No rows for {type(layer).__name__}: Linear and Conv1d/2d/3d only.")
    if _has_bias(layer):
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
    return a, g


def matrix_gradient(layer: nn.Module) -> Tensor:
    """The layer's `.grad` as its matrix V: `[d_out, d_in]`, or `[J, d_out, d_in]` if grouped."""
    matrix = _as_matrix([p.grad for p in _parameters(layer)]).double()
    groups = getattr(layer, "groups", 1)
    return matrix if groups == 1 else matrix.unflatten(0, (groups, -1))


def gradient_from_rows(a: Tensor, g: Tensor) -> Tensor:
    """`Σ g aᵀ` over samples and positions: what autograd must give for V."""
    return torch.einsum("...nso,...nsi->...oi", g, a)


def _linear_rows(x: Tensor) -> Tensor:
    """`[N, ..., d]` to `[N, S, d]`; a lone vector is one sample."""
    x = x if x.dim() > 1 else x.unsqueeze(0)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _conv_rows(layer: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Patches without a bias column, and the output gradients in the same order of positions."""
    if x.dim() == len(layer.kernel_size) + 1:  # torch accepts one sample without a batch dimension
        x, g = x.unsqueeze(0), g.unsqueeze(0)
    a_groups, g_groups = [], []
    for x_group, g_group in zip(x.chunk(layer.groups, 1), g.chunk(layer.groups, 1), strict=True):
        a_groups.append(_patches(layer, x_group, g.shape[2:]))
        g_groups.append(g_group.flatten(2).transpose(1, 2))
    if layer.groups == 1:
        return a_groups[0], g_groups[0]
    return torch.stack(a_groups), torch.stack(g_groups)


def _patches(layer: Any, x: Tensor, positions: torch.Size) -> Tensor:
    """One slice of the padded input per output position: `[N, S, C·taps]`."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
    patches = []
    for position in product(*(range(size) for size in positions)):
        window = [slice(None), slice(None)]
        for p, k, s, d in zip(
            position, layer.kernel_size, layer.stride, layer.dilation, strict=True
        ):
            window.append(slice(p * s, p * s + d * (k - 1) + 1, d))
        patches.append(x[tuple(window)].flatten(1))
    return torch.stack(patches, dim=1)


# --- factors ---------------------------------------------------------------------------------


def kfac_factors(
    a: Tensor, g: Tensor, sharing: Sharing = "expand", loss_average: LossAverage = "batch"
) -> tuple[Tensor, Tensor]:
    """Factors of the empirical Fisher from rows; g is the gradient of the loss as it was averaged.

    With c the divisor of the loss, expand: `A = Σ a aᵀ/(N·S)`, `G = c·Σ g gᵀ`. Reduce takes the
    mean of a and the sum of g over S first, then `A = Σ a aᵀ/N`, `G = c·Σ g gᵀ`.
    `"token"` is not known here: pass the number of loss terms.
    """
    divisor = _divisor(loss_average, num_samples=g.shape[-3])
    return _input_factor(a, sharing), divisor * _gradient_scatter(g, sharing)


def type2_factors(
    layer: nn.Module,
    x: Tensor,
    gradients: Tensor,
    sharing: Sharing = "expand",
    loss_average: LossAverage = "batch",
) -> tuple[Tensor, Tensor]:
    """Factors of the exact Fisher from `type2_output_gradients`: `G = (1/c)·Σ_k Σ g gᵀ`."""
    rows = [layer_rows(layer, x, g) for g in gradients]
    divisor = _divisor(loss_average, num_samples=rows[0][1].shape[-3])
    scatter = torch.stack([_gradient_scatter(g, sharing) for _, g in rows]).sum(0)
    return _input_factor(rows[0][0], sharing), scatter / divisor


def type2_output_gradients(
    outputs: Tensor, z: Tensor, likelihood: Likelihood, mask: Tensor | None = None
) -> Tensor:
    """Gradients at the pre-activation z of every column of the loss Hessian's square root.

    Outputs are `[N, C]` or `[N, T, C]`, the mask `[N]` or `[N, T]`. Each of the K = T·C backward
    passes takes one column of one term, for all samples at once (samples must not mix).
    Returns `[K, *z.shape]`, of the terms themselves: nothing is averaged.
    """
    terms = outputs.unsqueeze(1) if outputs.dim() == 2 else outputs
    keep = _term_mask(terms, mask)
    passes = []
    for t, c in product(range(terms.shape[1]), range(terms.shape[2])):
        direction = torch.zeros_like(terms)
        for n in range(terms.shape[0]):
            root = _symmetric_root(loss_hessian(terms[n, t], likelihood))
            direction[n, t] = keep[n, t] * root[:, c]
        (g,) = torch.autograd.grad(terms, z, direction, retain_graph=True)
        passes.append(g)
    return torch.stack(passes)


def _input_factor(a: Tensor, sharing: Sharing) -> Tensor:
    if sharing == "reduce":
        a = a.mean(dim=-2, keepdim=True)
    return torch.einsum("...nsi,...nsj->...ij", a, a) / (a.shape[-3] * a.shape[-2])


def _gradient_scatter(g: Tensor, sharing: Sharing) -> Tensor:
    if sharing == "reduce":
        g = g.sum(dim=-2, keepdim=True)
    return torch.einsum("...nsi,...nsj->...ij", g, g)


# --- steps -----------------------------------------------------------------------------------


def eigen_step(A: Tensor, G: Tensor | None, V: Tensor, gamma: float) -> Tensor:
    """`(G ⊗ A + γI)⁻¹ vec(V)` by a dense solve, in V's shape; `G=None` is the identity."""
    if V.dim() == 3:
        return _per_group(eigen_step, A, G, V, gamma)
    A, G, V = A.double(), _or_identity(G, V), V.double()
    curvature = torch.kron(G, A) + gamma * _identity(V.numel())
    return torch.linalg.solve(curvature, V.flatten()).reshape(V.shape)


def cholesky_step(A: Tensor, G: Tensor | None, V: Tensor, gamma: float) -> Tensor:
    """`(G + √γ/π I)⁻¹ V (A + π√γ I)⁻¹`, π² = (tr A/d_A)/(tr G/d_G); π = 1 if a trace is zero."""
    if V.dim() == 3:
        return _per_group(cholesky_step, A, G, V, gamma)
    A, G, V = A.double(), _or_identity(G, V), V.double()
    mean_a, mean_g = A.trace() / A.shape[0], G.trace() / G.shape[0]
    pi = (mean_a / mean_g).sqrt().item() if mean_a > 0 and mean_g > 0 else 1.0
    left = torch.linalg.inv(G + gamma**0.5 / pi * _identity(G.shape[0]))
    right = torch.linalg.inv(A + gamma**0.5 * pi * _identity(A.shape[0]))
    return left @ V @ right


def _per_group(step: Any, A: Tensor, G: Tensor | None, V: Tensor, gamma: float) -> Tensor:
    sides = [None] * len(V) if G is None else list(G)
    return torch.stack([step(*group, gamma) for group in zip(A, sides, V, strict=True)])


def _or_identity(G: Tensor | None, V: Tensor) -> Tensor:
    return _identity(V.shape[-2]) if G is None else G.double()


def _identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


# --- dense curvature of one layer ------------------------------------------------------------


def dense_ggn_block(
    layer: nn.Module,
    outputs: Tensor,
    likelihood: Likelihood,
    loss_average: LossAverage = "batch",
    mask: Tensor | None = None,
) -> Tensor:
    """The layer's exact GGN (Fisher) block `Σ Jᵀ H J / c`, one output at a time by autograd.

    Outputs are `[N, C]` or `[N, T, C]`, in the graph. Returns `[d, d]`, d = d_out·d_in, in the
    order of V flattened by rows; group j of J is the j-th diagonal block of d/J rows.
    """
    terms = outputs.unsqueeze(1) if outputs.dim() == 2 else outputs
    keep = _term_mask(terms, mask)
    blocks = []
    for n, t in product(range(terms.shape[0]), range(terms.shape[1])):
        jacobian = torch.stack([_parameter_gradient(layer, output) for output in terms[n, t]])
        hessian = loss_hessian(terms[n, t], likelihood)
        blocks.append(keep[n, t] * jacobian.T @ hessian @ jacobian)
    divisor = _divisor(loss_average, num_samples=terms.shape[0], num_terms=keep.sum().item())
    return torch.stack(blocks).sum(0) / divisor


def empirical_fisher_block(
    layer: nn.Module, sample_losses: Tensor, loss_average: LossAverage = "batch"
) -> Tensor:
    """The layer's empirical Fisher block `Σₙ uₙuₙᵀ / c`, uₙ the gradient of sample n's loss."""
    gradients = torch.stack([_parameter_gradient(layer, loss) for loss in sample_losses])
    return gradients.T @ gradients / _divisor(loss_average, num_samples=len(sample_losses))


def loss_hessian(output: Tensor, likelihood: Likelihood) -> Tensor:
    """Hessian `[C, C]` of one term's negative log-likelihood; Gaussian means `½‖f - y‖²`."""
    f = output.detach().double()
    if likelihood == "categorical":
        p = f.softmax(dim=0)
        return p.diag() - torch.outer(p, p)
    if likelihood == "bernoulli":
        p = f.sigmoid()
        return (p * (1 - p)).diag()
    if likelihood == "gaussian":
        return _identity(len(f))
    raise ValueError(f"Invalid {likelihood=}: categorical, bernoulli or gaussian.")


def _symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T


def _parameter_gradient(layer: nn.Module, scalar: Tensor) -> Tensor:
    """Gradient of a scalar with respect to V, flattened by rows."""
    grads = torch.autograd.grad(
        scalar, _parameters(layer), retain_graph=True, materialize_grads=True
    )
    return _as_matrix(grads).flatten().double()


def _parameters(layer: Any) -> list[nn.Parameter]:
    return [layer.weight, layer.bias] if _has_bias(layer) else [layer.weight]


def _has_bias(layer: Any) -> bool:
    """A frozen bias is no bias."""
    return layer.bias is not None and layer.bias.requires_grad


def _as_matrix(tensors: Any) -> Tensor:
    return torch.cat([t.reshape(t.shape[0], -1) for t in tensors], dim=1)


def _term_mask(terms: Tensor, mask: Tensor | None) -> Tensor:
    """The mask as `[N, T]` zeros and ones."""
    if mask is None:
        return terms.new_ones(terms.shape[:2])
    return mask.reshape(terms.shape[:2]).to(terms.dtype)


def _divisor(loss_average: LossAverage, num_samples: int, num_terms: float | None = None) -> float:
    if loss_average is None:
        return 1.0
    if loss_average == "batch":
        return float(num_samples)
    if loss_average == "token":
        if num_terms is None:
            raise ValueError("The number of loss terms is not known here: pass it as a number.")
        return num_terms
    return float(loss_average)
