"""How long steps are under ``rescale="auto"``: what a layer's gradients have been like so far.

A multiple of Muon's length, the product of five numbers of which none depends on the scale of the loss:

- *coherence*: how much recent gradients agree. Steps are shorter where they are mostly noise, and shorter
  still where gradients turn back and forth.
- *size*: how large gradients are now, compared with what they usually were. Where a model fits its data
  they vanish, and so do its steps.
- *age*: a rate that is right for a hundred steps is too large for thousands, since noise adds up. Lengths
  fall as ``1/√t``, but never below a third. Steps whose gradients turn back are not noise, and do not age
  a layer under a rate that falls.
- *inputs*: what a step does to a layer's outputs is its length times its inputs. Where these have grown
  beyond a root mean square of 1, steps are as much shorter, down to a half.
- *scale*: where the loss does not depend on the scale of a layer's weight (:mod:`.scale_free`), what a
  step does depends on its share of the weight alone. It is a share of the weight's norm, which is kept.

That steps settle by themselves is for rates that stay as they are. Once the learning rate falls, the
schedule sees to it: size is left as it was, and gradients that turn back count as noise, no less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

#: Length of a first step, as a multiple of Muon's.
FIRST = 2.25
#: Steps after which the length has fallen by √2, and the share that always remains.
YOUNG, REMAINS = 100.0, 1 / 3
#: With which power of it a coherence below that of noise counts as a step of noise.
TURNING = 4
#: How much shorter steps are at most where inputs are large.
GROWN = 2.0
#: How much longer first steps are where the loss does not depend on the scale of a weight, if its norm
#: is 1, and after how many they have fallen by √2. Nothing has to remain: such weights never grow.
FREE, FREE_YOUNG = 2.0, 25.0
#: At higher rates they fall sooner, so that later ones are alike: weights that grew would see to it.
USUAL_RATE = 0.1
#: How far above the recent ones a logarithm of squares may be and still count in full: spikes do not.
SURPRISE = 2.0


def remember(
    buffers: Sequence[Mapping[str, Tensor]], squares: Tensor, rates: Sequence[float | Tensor]
) -> None:
    """Take squared norms of gradients, ``[layers]``, into what is known of each layer.

    That is ``(count, usual, recent, peak)``: steps that age it, means of logarithms over all steps, and
    with the weights of the momentum buffer, as long as the learning rate is the largest so far, its peak;
    and ``(rate, kept)``, that of this step and the norm of a weight whose scale is without effect. A
    gradient that is zero, or not a number, says nothing. The layers are on one device and in one
    precision, and ``"coherence"`` is up to date.
    """
    held = [one["history"] for one in buffers]
    count, usual, recent, peak = torch.stack(held).unbind(1)
    paces = [one["pace"] for one in buffers]
    kept = torch.stack(paces)[:, 1]
    weight = torch.stack([one["coherence"][0] for one in buffers])
    level, first = squares.log(), count == 0
    level = torch.where(first, level, torch.minimum(level, recent + SURPRISE))
    rate = side_by_side(rates, peak)
    steady = peak <= rate
    count = count + torch.isfinite(level)
    change = _or_zero(level - usual) * steady
    usual = torch.addcdiv(usual, change, count.clamp(min=1))
    change = _or_zero(level - recent) * steady
    recent = torch.addcdiv(recent, change, torch.where(first, 1.0, weight))
    peak = torch.where(steady, rate, peak)
    known = torch.stack([count, usual, recent, peak], dim=1).unbind()
    pace = torch.stack([torch.zeros_like(peak) + rate, kept], dim=1).unbind()
    torch._foreach_copy_([*held, *paces], [*known, *pace])


def side_by_side(rates: Sequence[float | Tensor], like: Tensor) -> float | Tensor:
    """Learning rates of layers: one number if they all have the same."""
    first = rates[0]
    if not isinstance(first, Tensor) and all(rate is first or rate == first for rate in rates):
        return float(first)
    # Numbers are written by kernels: a device is waited for when something is copied to it.
    numbers = (rate if isinstance(rate, Tensor) else like.new_full((), rate) for rate in rates)
    return torch.stack([number.to(like).reshape(()) for number in numbers])


def _or_zero(change: Tensor) -> Tensor:
    return change.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def lengths(
    buffers: Sequence[Mapping[str, Tensor]], norms: Sequence[Tensor | None] | None = None
) -> Tensor | None:
    """Lengths of the layers' steps as multiples of Muon's, ``[layers]``; ``None`` without momentum.

    It is asked for once a step, and takes back what of the step does not age a layer. ``norms`` are those
    of momentum buffers of which slices are here.
    """
    if not all("history" in one for one in buffers):
        return None
    held = torch.stack([one["history"] for one in buffers])
    count, usual, recent, peak = held.unbind(1)
    rate, kept = torch.stack([one["pace"] for one in buffers]).unbind(1)
    weights = torch.stack([one["coherence"][0] for one in buffers])
    noise, falls = (2 * weights - 1).rsqrt_(), rate < peak  # √((1-μ)/(1+μ))
    agreement = coherences(buffers, norms)
    turned = 1 - (agreement / noise).clamp_(max=1).pow_(TURNING)
    count = (count - turned * falls).clamp_(min=0)
    torch._foreach_copy_([one["history"][0] for one in buffers], count.unbind())
    size = ((recent - usual) / 2).clamp_(max=0).exp_()
    is_free, before = kept > 0, (count - 1).clamp_(min=0)
    inputs = torch.stack([one["inputs"] for one in buffers])
    plain = (1 + before / YOUNG).rsqrt_().clamp_(min=REMAINS) / inputs.clamp_(1, GROWN)
    old = before / FREE_YOUNG * (peak / USUAL_RATE).clamp_(min=1).square_()
    age = torch.where(is_free, FREE * kept * (1 + old).rsqrt_(), plain)
    agreement = torch.maximum(agreement, noise * falls)
    return agreement * size * age.mul_(FIRST)


def coherences(
    buffers: Sequence[Mapping[str, Tensor]], norms: Sequence[Tensor | None] | None = None
) -> Tensor:
    """How much recent gradients of each layer agree, ``[layers]`` in [0, 1].

    It is ``‖Σ wᵢ gᵢ‖ / √(Σ wᵢ · Σ wᵢ‖gᵢ‖²)``: 1 if they are all the same and about ``√((1-μ)/(1+μ))`` if
    they are noise.
    """
    weights, squares = torch.stack([one["coherence"] for one in buffers]).unbind(1)
    most = (weights * squares).sqrt_()
    found = norms or [None] * len(buffers)
    here = [one["momentum"] for one, norm in zip(buffers, found, strict=True) if norm is None]
    rest = iter(torch._foreach_norm(here) if here else ())
    sizes = torch.stack([next(rest) if norm is None else norm.to(most) for norm in found])
    ratios = sizes / most.clamp_(min=torch.finfo(most.dtype).tiny)
    # Squares that overflow, here or above, say nothing.
    return torch.nan_to_num_(ratios, nan=1.0, posinf=1.0).clamp_(max=1)
