"""What layers see in one pass, found by adding a zero to each output and differentiating by it.

This shares no code with the library. It works on a copy of the net that overwrites nothing, and in
which attention is four linear layers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.attention_oracle import ReferenceAttention
from tests.fuzz.cases import Case, Part
from tests.fuzz.nets import Net, out_of_place
from tests.layer_oracles import normalized
from tests.oracles import layer_rows

Draw = list[Tensor | None]


@dataclass
class Use:
    """One call of a module: its input, and the gradient of its output for each draw."""

    module: nn.Module
    x: Tensor
    probe: Tensor
    grads: Draw = field(default_factory=list)


@dataclass
class SeenPass:
    """One forward and backward: its samples and loss terms, and the uses of each module by name."""

    samples: int
    terms: int
    uses: dict[str, list[Use]]
    #: How much each draw counts.
    share: float = 1.0

    def of(self, names: list[str]) -> list[Use]:
        """The uses of a layer."""
        return [use for name in names for use in self.uses.get(name, [])]

    def broadcasts(self, uses: list[Use]) -> bool:
        """Whether one input serves all samples, so that its gradient is a sum over them."""
        return self.samples > 1 and any(len(use.x) == 1 for use in uses)


def twin(net: Net) -> Net:
    """A copy that works out of place, with the products of attention in sight."""
    copied = out_of_place(copy.deepcopy(net))
    for name, module in list(copied.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            parent, _, child = name.rpartition(".")
            setattr(copied.get_submodule(parent), child, ReferenceAttention(module))
    assert isinstance(copied, Net)
    return copied


def see(net: Net, case: Case, part: Part, step: int, micro: int) -> SeenPass:
    """Run a pass on a copy of the net."""
    copied = twin(net)
    copied.set_moment(step, micro)
    uses: dict[str, list[Use]] = defaultdict(list)
    for name, module in copied.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(_remember(uses[name]))
    scores = copied(part.x)
    probes = [use.probe for found in uses.values() for use in found]
    seen = SeenPass(len(part.x), part.terms, dict(uses))
    if case.options["fisher"] == "forward":
        draws = []
    elif case.options["fisher"] == "empirical":
        draws = [torch.autograd.grad(part.loss(scores), probes, allow_unused=True)]
    else:
        directions = _directions(case, part, scores, step, micro)
        draws = [
            torch.autograd.grad(scores, probes, d, retain_graph=True, allow_unused=True)
            for d in directions
        ]
        seen.share = 1 / len(draws) if case.options["fisher"] == "mc" else 1.0
    for draw in draws:
        for use, grad in zip((u for found in uses.values() for u in found), draw, strict=True):
            use.grads.append(grad)
    return seen


def _remember(found: list[Use]) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        probe = torch.zeros_like(output, requires_grad=True)
        found.append(Use(module, args[0].detach().clone(), probe))
        return output + probe

    return hook


def _directions(case: Case, part: Part, scores: Tensor, step: int, micro: int) -> list[Tensor]:
    """Gradients of single loss terms at the scores, of labels that the model gives itself."""
    chance = scores.detach().softmax(-1)
    classes = chance.shape[-1]
    counts = (part.targets >= 0).double()[..., None]
    found = []
    if case.options["fisher"] == "mc":
        generator = case.draws(step, micro)
        for _ in range(case.samples_per_term):
            noise = torch.rand(*chance.shape[:-1], 1, generator=generator, dtype=chance.dtype)
            label = (chance.cumsum(-1)[..., :-1] <= noise).sum(-1)
            found.append(counts * (chance - nn.functional.one_hot(label, classes)))
        return found
    for position in range(chance[0, ..., 0].numel()):  # terms of a sample must not mix
        only = torch.zeros_like(chance[..., :1]).flatten(1)
        only[:, position] = 1
        for label in range(classes):
            unit = nn.functional.one_hot(torch.tensor(label), classes)
            column = chance[..., label, None].sqrt() * (unit - chance)
            found.append(column * counts * only.view_as(chance[..., :1]))
    return found


# --- canonical rows --------------------------------------------------------------------------


def matrix_rows(use: Use, has_bias: bool) -> tuple[Tensor, list[Tensor | None]]:
    """``a [*b, N, S, d_in]`` and, for each draw, ``g [*b, N, S, d_out]`` of a matrix layer."""
    module = use.module
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        zeros = torch.zeros_like(use.probe)
        a = layer_rows(module, use.x, zeros)[0]
        own = module.bias is not None and module.bias.requires_grad
        a = a if own == has_bias else a[..., :-1]
        return a, [None if g is None else layer_rows(module, use.x, g)[1] for g in use.grads]
    a = use.x.reshape(len(use.x), -1, use.x.shape[-1])  # a linear layer stored transposed
    if has_bias:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    return a, [None if g is None else g.reshape(len(g), -1, g.shape[-1]) for g in use.grads]


def token_rows(use: Use, width: int) -> tuple[Tensor, list[Tensor | None]]:
    """One-hot rows ``[R, width]`` and gradients ``[R, d]`` of an embedding, without padding."""
    assert isinstance(use.module, nn.Embedding)
    tokens = use.x.flatten()
    keep = tokens != (-1 if use.module.padding_idx is None else use.module.padding_idx)
    one_hot = nn.functional.one_hot(tokens[keep], width).double()
    return one_hot, [None if g is None else g.flatten(0, -2)[keep] for g in use.grads]


def norm_rows(use: Use, has_bias: bool, grouped: bool) -> Draw:
    """Gradients of weight and bias of each sample, or of each position: ``[N, C, p]``."""
    return [None if g is None else _norm_row(use, g, has_bias, grouped) for g in use.grads]


def _norm_row(use: Use, g: Tensor, has_bias: bool, grouped: bool) -> Tensor:
    columns = [g * normalized(use.module, use.x)] + ([g] if has_bias else [])
    if isinstance(use.module, nn.LayerNorm | nn.RMSNorm):
        kept = use.module.weight.dim()
        shape = (len(g), -1) if grouped else (-1, 1)
        summed = [c.reshape(*shape, *c.shape[-kept:]).sum(1).flatten(1) for c in columns]
    else:
        summed = [c.reshape(*c.shape[:2], -1).sum(-1) for c in columns]
    return torch.stack(summed, -1)
