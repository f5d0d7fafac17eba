"""Small models around embeddings, norm layers, attention and transposed linear layers.

Every model takes tensors with samples first and returns `[N, CLASSES]`. They are built in the default
dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training import CLASSES

N, GAMMA = 6, 0.05
VOCABULARY, WIDTH, LENGTH, HEADS = 9, 4, 3, 2

Data = tuple[Tensor, ...]
Loss = Callable[[nn.Module], Tensor]


@dataclass
class Kind:
    """A model and how to make data for it."""

    model: nn.Module
    shapes: tuple[tuple[int, ...], ...] = ()
    tokens: int = 0

    def data(self, number: int = 0, samples: int = N) -> Data:
        """Inputs, then labels: the same whenever the number is the same."""
        generator = torch.Generator().manual_seed(100 + number)
        inputs = [torch.randn(samples, *shape, generator=generator) for shape in self.shapes]
        if self.tokens:
            inputs = [torch.randint(self.tokens, (samples, LENGTH), generator=generator)]
        return *inputs, torch.randint(CLASSES, (samples,), generator=generator)


def loss_on(data: Data, over: float = 1.0) -> Loss:
    """Mean cross entropy of the model on inputs and labels."""
    return lambda model: F.cross_entropy(model(*data[:-1]), data[-1]) / over


def parts_of(data: Data, count: int) -> list[Data]:
    return list(zip(*(tensor.chunk(count) for tensor in data), strict=True))


class Checkpoints(nn.Module):
    """Runs a model's `middle` under activation checkpointing, of either kind or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.reentrant: bool | None = None

    def run(self, part: Callable[..., Any], *args: Tensor) -> Any:
        if self.reentrant is None:
            return part(*args)
        return checkpoint(part, *args, use_reentrant=self.reentrant)


# --- embeddings ------------------------------------------------------------------------------


class Embedded(Checkpoints):
    """Tokens looked up, mixed and pooled."""

    def __init__(self, uses: int = 1, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, **options)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.uses = uses

    def forward(self, tokens: Tensor) -> Tensor:
        one = torch.ones((), requires_grad=True)  # reentrant checkpoints need a gradient to come
        z = self.run(self.middle, one, tokens)
        return self.head(z.tanh().mean(1))

    def middle(self, one: Tensor, tokens: Tensor) -> Tensor:
        z = self.embedding(tokens) * one
        for use in range(1, self.uses):
            z = z.sin() * self.embedding((tokens + use) % VOCABULARY)
        return z


def embedded(**options: Any) -> Kind:
    torch.manual_seed(0)
    return Kind(Embedded(**options), tokens=VOCABULARY)


# --- norm layers -----------------------------------------------------------------------------


class SmallRMSNorm(nn.Module):
    """In the style of Hugging Face: found by its name and what it has."""

    def __init__(self, width: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )


class Normed(Checkpoints):
    """A norm layer, called once or more, a nonlinearity and a head."""

    def __init__(self, norm: nn.Module, shape: tuple[int, ...], uses: int = 1) -> None:
        super().__init__()
        self.norm, self.uses = norm, uses
        self.head = nn.Linear(torch.Size(shape).numel(), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is not None:
            x = x.detach().requires_grad_()
        return self.head(self.run(self.middle, x).flatten(1))

    def middle(self, x: Tensor) -> Tensor:
        z = self.norm(x).tanh()
        for _ in range(1, self.uses):
            z = self.norm(z + x.square()).tanh()
        return z


NORMS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "batch1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch1d-sequence": (lambda: nn.BatchNorm1d(4), (4, 3)),
    "batch1d-untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4,)),
    "batch2d": (lambda: nn.BatchNorm2d(3, eps=1e-2), (3, 2, 2)),
    "batch3d": (lambda: nn.BatchNorm3d(2), (2, 2, 1, 2)),
    "layer": (lambda: nn.LayerNorm(4), (4,)),
    "layer-sequence": (lambda: nn.LayerNorm(4, eps=1e-2), (3, 4)),
    "layer-two-dims": (lambda: nn.LayerNorm([3, 4]), (2, 3, 4)),
    "layer-all-dims": (lambda: nn.LayerNorm([2, 3]), (2, 3)),
    "layer-no-bias": (lambda: nn.LayerNorm(4, bias=False), (3, 4)),
    "group": (lambda: nn.GroupNorm(2, 4, eps=1e-2), (4, 3, 2)),
    "group-flat": (lambda: nn.GroupNorm(2, 4), (4,)),
    "group-one": (lambda: nn.GroupNorm(1, 4), (4, 3)),
    "instance1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 4)),
    "instance2d": (lambda: nn.InstanceNorm2d(3, eps=1e-2, affine=True), (3, 2, 2)),
    "instance3d": (lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 1, 2)),
    "rms": (lambda: nn.RMSNorm(4), (3, 4)),
    "rms-two-dims": (lambda: nn.RMSNorm([3, 4], eps=1e-2), (3, 4)),
    "hugging-face-rms": (lambda: SmallRMSNorm(4), (3, 4)),
}
MIXING = [name for name in NORMS if name.startswith("batch")]  # a sample's output depends on others
PER_SAMPLE = [name for name in NORMS if name not in MIXING]


def normed(name: str, uses: int = 1) -> Kind:
    torch.manual_seed(0)
    make, shape = NORMS[name]
    model = Normed(make(), shape, uses)
    for parameter in model.norm.parameters():  # not ones and zeros, which hide mistakes
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return Kind(model, (shape,))


# --- attention -------------------------------------------------------------------------------


class Attending(Checkpoints):
    """Attention of the first input to the others, pooled; returned weights are used as well."""

    def __init__(
        self, attention: nn.Module, lone: bool = False, uses: int = 1, **call: Any
    ) -> None:
        super().__init__()
        self.attention, self.call, self.lone, self.uses = attention, call, lone, uses
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, query: Tensor, *others: Tensor) -> Tensor:
        if self.reentrant is not None:
            query = query.detach().requires_grad_()
        z, weights = self.run(self.middle, query, *others)
        outputs = self.head(z.tanh().mean(1))
        if weights is not None:
            used = weights.square().flatten(1).sum(1, keepdim=True)
            outputs = outputs + used * torch.arange(CLASSES, dtype=used.dtype)
        return outputs

    def middle(self, query: Tensor, *others: Tensor) -> tuple[Tensor, Tensor | None]:
        key = others[0] if others else query
        value = others[1] if len(others) > 1 else key
        if self.lone:  # one sample after the other, without a dimension for samples
            both = [self._attend(*one) for one in zip(query, key, value, strict=True)]
            return torch.stack([z for z, _ in both]), torch.stack([w for _, w in both])
        for _ in range(1, self.uses):
            query = self._attend(query, key, value)[0].sin()
        return self._attend(query, key, value)

    def _attend(self, *tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.attention.batch_first or self.lone:
            return self.attention(*tensors, **self.call)
        moved: dict[int, Tensor] = {}  # the same tensor stays the same
        swapped = [moved.setdefault(id(t), t.transpose(0, 1)) for t in tensors]
        z, weights = self.attention(*swapped, **self.call)
        return z.transpose(0, 1), weights


SELF = ((LENGTH, WIDTH),)
CROSS = ((LENGTH, WIDTH), (5, WIDTH), (5, WIDTH))
KEY_IS_VALUE = CROSS[:2]
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def padding(length: int = LENGTH) -> Tensor:
    """The last keys of every other sample do not exist."""
    mask = torch.zeros(N, length, dtype=torch.bool)
    mask[::2, -1] = True
    return mask


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).sin().reshape(shape)


# name: options of the module, shapes of the inputs, options of the call
ATTENTIONS: dict[str, Callable[[], tuple[dict[str, Any], Any, dict[str, Any]]]] = {
    "self": lambda: ({}, SELF, {}),
    "self-no-weights": lambda: ({}, SELF, {"need_weights": False}),
    "self-weights-per-head": lambda: ({}, SELF, {"average_attn_weights": False}),
    "sequence-first": lambda: ({"batch_first": False}, SELF, {}),
    "sequence-first-no-weights": lambda: ({"batch_first": False}, SELF, {"need_weights": False}),
    "sequence-first-cross": lambda: ({"batch_first": False}, CROSS, {}),
    "cross": lambda: ({}, CROSS, {}),
    "cross-no-weights": lambda: ({}, CROSS, {"need_weights": False}),
    "key-is-value": lambda: ({}, KEY_IS_VALUE, {}),
    "other-widths": lambda: ({"kdim": 3, "vdim": 5}, (SELF[0], (5, 3), (5, 5)), {}),
    "other-widths-no-bias": lambda: (
        {"kdim": 3, "vdim": 5, "bias": False},
        (SELF[0], (5, 3), (5, 5)),
        {"need_weights": False},
    ),
    "no-bias": lambda: ({"bias": False}, SELF, {}),
    "bias-kv": lambda: ({"add_bias_kv": True}, SELF, {}),
    "zero-attn": lambda: ({"add_zero_attn": True}, SELF, {"need_weights": False}),
    "bias-kv-and-zero-attn": lambda: (
        {"add_bias_kv": True, "add_zero_attn": True},
        CROSS,
        {"attn_mask": numbers(LENGTH, 5)},
    ),
    "bool-mask": lambda: ({}, SELF, {"attn_mask": CAUSAL}),
    "float-mask": lambda: ({}, CROSS, {"attn_mask": numbers(LENGTH, 5), "need_weights": False}),
    "mask-3d": lambda: ({}, SELF, {"attn_mask": numbers(N * HEADS, LENGTH, LENGTH)}),
    "padding": lambda: ({}, SELF, {"key_padding_mask": padding()}),
    "padding-no-weights": lambda: (
        {},
        CROSS,
        {"key_padding_mask": padding(5), "need_weights": False},
    ),
    "mask-and-padding": lambda: ({}, SELF, {"attn_mask": CAUSAL, "key_padding_mask": padding()}),
    "causal": lambda: ({}, SELF, {"attn_mask": CAUSAL, "is_causal": True}),
    "causal-no-weights": lambda: (
        {},
        SELF,
        {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    ),
    "unbatched": lambda: ({}, SELF, {"lone": True}),
    "unbatched-cross": lambda: ({"batch_first": False}, CROSS, {"lone": True}),
    "unbatched-padding": lambda: (
        {},
        SELF,
        {"lone": True, "key_padding_mask": padding()[0]},
    ),
    "unbatched-mask-3d": lambda: (
        {},
        SELF,
        {"lone": True, "attn_mask": numbers(HEADS, LENGTH, LENGTH)},
    ),
    "twice": lambda: ({}, SELF, {"uses": 2}),
}


def attending(name: str = "self", **changes: Any) -> Kind:
    """One of ATTENTIONS; further options go to the module."""
    torch.manual_seed(0)
    module, shapes, call = ATTENTIONS[name]()
    attention = nn.MultiheadAttention(WIDTH, HEADS, **({"batch_first": True} | module | changes))
    for parameter_name, parameter in attention.named_parameters():
        if "bias" in parameter_name:
            nn.init.uniform_(parameter, -0.5, 0.5)
    return Kind(Attending(attention, **call), shapes)


class Tagger(nn.Module):
    """A loss term per token: embedding, attention, norm and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        z = self.embedding(tokens)
        return self.head(self.norm(z + self.attention(z, z, z)[0]).tanh())


# --- transposed linear layers ----------------------------------------------------------------


class Conv1D(nn.Module):
    """In the style of Hugging Face's GPT-2: the weight is `[in, out]`."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf) / 2)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return z.view(*x.shape[:-1], self.nf)


class Transposed(Checkpoints):
    """A transposed linear layer, called once or more, and a head."""

    def __init__(self, layer: nn.Module, uses: int = 1) -> None:
        super().__init__()
        self.layer, self.uses = layer, uses
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is not None:
            x = x.detach().requires_grad_()
        return self.head(self.run(self.middle, x).mean(1))

    def middle(self, x: Tensor) -> Tensor:
        z = self.layer(x).tanh()
        for _ in range(1, self.uses):
            z = z + self.layer(x + z[..., :WIDTH]).tanh()
        return z


def transposed(make: Callable[[int, int], nn.Module] = Conv1D, uses: int = 1) -> Kind:
    torch.manual_seed(0)
    return Kind(Transposed(make(5, WIDTH), uses), ((LENGTH, WIDTH),))
