"""Draws nets: a few pieces in a row, each with a layer kind that the library preconditions."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import nn

from tests.fuzz import blocks
from tests.fuzz.nets import Features, Inputs, Net

#: Positions of sequences: more than a batch has samples, so that neither is taken for the other.
LENGTH = 7
TOKENS = 9
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


class Maker:
    """Draws a net; ``shape`` is that of a sample at the present place, features last or first."""

    def __init__(self, rng: Random, features: Features) -> None:
        self.rng, self.features = rng, features
        self.pieces: list[nn.Module] = []
        self.shape: tuple[int, ...] = ()
        self.channels_first = False

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def inplace(self) -> bool:
        return self.chance(0.5) and self.features.inplace

    @property
    def width(self) -> int:
        return self.shape[0 if self.channels_first else -1]

    # --- the whole net ------------------------------------------------------------------------

    def net(self) -> tuple[Net, Inputs]:
        inputs, embedding = self.start()
        for _ in range(self.rng.randint(1, 4)):
            self.add_piece()
        if self.channels_first:
            self.pieces.append(blocks.Turn())
            self.shape, self.channels_first = (*self.shape[1:], self.shape[0]), False
        head = nn.Linear(self.width, self.rng.randint(2, 4), bias=self.chance(0.7))
        fits = embedding is not None and embedding.embedding_dim == self.width
        if fits and self.features.tied and self.chance(0.4):
            assert embedding is not None
            head = nn.Linear(self.width, TOKENS, bias=self.chance(0.5))
            head.weight = embedding.weight
        unused = nn.Linear(3, 2) if self.features.idle and self.chance(0.2) else None
        net = Net(self.pieces, head, pooled=self.chance(0.5), unused=unused)
        if self.features.frozen and self.chance(0.4):
            self.freeze(net)
        return net, inputs

    def start(self) -> tuple[Inputs, nn.Embedding | None]:
        """Choose what the net reads; tokens come with their embedding."""
        kind = self.rng.choice(["vector", "sequence", "grid", "map1", "map2", "map3", "tokens"])
        d = self.rng.choice([2, 3, 4, 6])
        if kind == "tokens" and self.features.tokens:
            padding = self.rng.choice([None, 0, 3])
            embedding = nn.Embedding(TOKENS, d, padding_idx=padding)
            self.pieces.append(embedding)
            self.shape = (LENGTH, d)
            return Inputs((LENGTH,), TOKENS), embedding
        shapes = {"vector": (d,), "grid": (LENGTH, 2, d), "map1": (d, 8), "map2": (d, 5, 4)}
        self.shape = {**shapes, "map3": (2, 4, 3, 3)}.get(kind, (LENGTH, d))
        self.channels_first = kind.startswith("map")
        return Inputs(self.shape), None

    def freeze(self, net: Net) -> None:
        """Freeze some parameters, not all."""
        parameters = [p for p in net.parameters() if p is not net.head.weight]
        for parameter in self.rng.sample(parameters, min(len(parameters), self.rng.randint(1, 2))):
            parameter.requires_grad_(False)

    # --- one piece ----------------------------------------------------------------------------

    def add_piece(self) -> None:
        ways: list[Callable[[], None]] = [self.use, self.use, self.use, self.special, self.norm]
        if not self.channels_first and len(self.shape) == 2:
            ways.append(self.positions)
            if self.features.attention:
                ways.append(self.attend)
            if self.features.ungrouped and self.shape[0] >= LENGTH:
                ways.append(self.flat)
        if len(self.shape) > 1:
            ways.append(self.turn)
        elif self.width % 2 == 0 and not self.channels_first:
            ways.append(self.unfold)
        self.rng.choice(ways)()

    def layer(self, width: int | None = None) -> nn.Module:
        """A matrix layer for the present shape that keeps the spatial size."""
        width = self.width if width is None else width
        bias = self.chance(0.75)
        if not self.channels_first:
            if self.chance(0.2):
                return blocks.Conv1D(width, self.width)
            return nn.Linear(self.width, width, bias=bias)
        groups = self.rng.choice([g for g in (1, 1, 2, 3) if not (self.width % g or width % g)])
        dims, dilation = len(self.shape) - 1, self.rng.choice([1, 1, 2])
        small = min(self.shape[1:]) < 2  # too small to be mirrored
        modes = ["zeros"] if small else ["zeros", "zeros", "reflect", "replicate", "circular"]
        mode, kernel = self.rng.choice(modes), self.rng.choice([1, 3]) if dilation == 1 else 2
        spacing = {"dilation": dilation, "padding": "same", "padding_mode": mode}
        return CONVS[dims](self.width, width, kernel, groups=groups, bias=bias, **spacing)

    def strided(self) -> nn.Module:
        """A convolution that changes the spatial size."""
        width, dims = self.rng.choice([2, 3, 4]), len(self.shape) - 1
        kernel, stride, padding = (
            tuple(self.rng.choice(c) for _ in range(dims)) for c in ([1, 2, 3], [1, 2], [0, 1])
        )
        groups = 2 if self.width % 2 == 0 and width % 2 == 0 and self.chance(0.3) else 1
        dilation = tuple(self.rng.choice([1, 2]) if k < 3 else 1 for k in kernel)
        spacing = (kernel, stride, padding, dilation, groups)
        conv = CONVS[dims](self.width, width, *spacing, bias=self.chance(0.75))
        sizes = zip(self.shape[1:], kernel, stride, padding, dilation, strict=True)
        self.shape = (width, *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))
        return conv

    def use(self) -> None:
        activation = self.rng.choice(["relu", "tanh", "scale", "none"])
        large = self.channels_first and min(self.shape[1:]) > 2
        if large and self.chance(0.5):
            layer = self.strided()
        else:
            width = self.rng.choice([2, 3, 4, 6])
            layer = self.layer(width)
            self.resize(width)
        self.pieces.append(blocks.Use(layer, activation, self.inplace()))

    def resize(self, width: int) -> None:
        rest = self.shape[1:] if self.channels_first else self.shape[:-1]
        self.shape = (width, *rest) if self.channels_first else (*rest, width)

    def special(self) -> None:
        """A piece that keeps the shape and uses its layers in an unusual way."""
        name = self.rng.choice(
            [
                "residual",
                "repeat",
                "fork",
                "halves",
                "slice",
                "late",
                "sometimes",
                "discard",
                "tied",
            ]
        )
        if name == "repeat":
            piece: nn.Module = blocks.Repeat(self.layer(), self.rng.choice([2, 3]), self.inplace())
        elif name == "fork":
            piece = blocks.Fork(self.layer(), self.layer(), self.inplace())
        elif name == "halves":
            layer = self.layer(2 * self.width)
            piece = blocks.Halves(layer, dim=1 if self.channels_first else -1)
        elif name == "slice":
            piece = blocks.Slice(self.layer(), self.inplace())
        elif name == "late":
            piece = blocks.Late(self.layer(), self.inplace())
        elif name == "sometimes" and self.features.idle:
            inner = blocks.Use(self.layer(), "tanh", self.inplace())
            of, every = self.rng.choice(["steps", "micro-batches"]), self.rng.choice([2, 3])
            piece = blocks.Sometimes(inner, of, every, self.rng.randrange(every))
        elif name == "discard" and self.features.discarded:
            piece = blocks.Discard(self.layer())
        elif name == "tied" and self.features.tied and not self.channels_first:
            piece = self.tied()
        else:
            piece = blocks.Residual(self.layer(), self.inplace())
        self.pieces.append(piece)

    def tied(self) -> nn.Module:
        """Two linear layers with one weight, with one bias or with a bias each."""
        first, second = (nn.Linear(self.width, self.width) for _ in range(2))
        second.weight = first.weight
        if self.chance(0.5):
            second.bias = first.bias
        uses = [blocks.Use(layer, "tanh", self.inplace()) for layer in (first, second)]
        return nn.Sequential(*uses)

    def norm(self) -> None:
        dims = len(self.shape) - 1
        if not self.channels_first:
            bias = self.chance(0.7)
            kinds = [nn.LayerNorm(self.width, bias=bias), nn.RMSNorm(self.width)]
            if dims == 0:
                kinds += self.channel_norms()
            if dims == 1:
                kinds.append(nn.LayerNorm(self.shape))
        else:
            kinds = self.channel_norms()
            if torch.tensor(self.shape[1:]).prod() > 1:
                kinds.append(INSTANCE_NORMS[dims](self.width, affine=True))
        chosen = self.rng.choice(kinds)
        activation = self.rng.choice(["none", "relu", "scale"])
        self.pieces.append(blocks.Use(chosen, activation, self.inplace()))

    def channel_norms(self) -> list[nn.Module]:
        dims = len(self.shape) - 1
        kinds: list[nn.Module] = []
        if self.features.batch_norm:
            kinds.append(BATCH_NORMS[dims](self.width))
        if dims or self.width > 2:
            groups = self.rng.choice([g for g in (1, 2) if self.width % g == 0])
            kinds.append(nn.GroupNorm(groups, self.width))
        return kinds or [nn.GroupNorm(1, self.width)]

    def attend(self) -> None:
        heads = self.rng.choice([h for h in (1, 2, 3) if self.width % h == 0])
        grouped = not self.features.ungrouped or self.shape[0] < LENGTH
        options = {"bias": self.chance(0.7), "batch_first": grouped or self.chance(0.6)}
        memory = None
        if self.chance(0.5):
            width = self.rng.choice([2, 5, self.width])
            memory = nn.Linear(self.width, width)
            options |= {"kdim": width, "vdim": width}
        attention = nn.MultiheadAttention(self.width, heads, **options)
        self.pieces.append(blocks.Attend(attention, memory, self.chance(0.5), self.inplace()))

    def positions(self) -> None:
        length, width = self.shape
        tokens = self.chance(0.6) and self.features.tokens
        layer = nn.Embedding(length, width) if tokens else nn.Linear(3, width)
        expanded = self.chance(0.4) or not self.features.broadcast
        self.pieces.append(blocks.Positions(layer, length, expanded))

    def flat(self) -> None:
        way = self.rng.choice(["positions first", "no samples"])
        layer = self.layer() if self.chance(0.7) else nn.LayerNorm(self.width)
        self.pieces.append(blocks.Flat(layer, way))

    def turn(self) -> None:
        if self.channels_first:
            self.pieces.append(blocks.Turn())
            self.shape = (*self.shape[1:], self.shape[0])
        else:
            self.pieces.append(blocks.TurnBack())
            self.shape = (self.shape[-1], *self.shape[:-1])
        self.channels_first = not self.channels_first

    def unfold(self) -> None:
        layer = nn.Linear(self.width, LENGTH * 4)
        self.pieces += [layer, blocks.Shape(LENGTH, 4)]
        self.shape = (LENGTH, 4)


def make_net(seed: int, features: Features) -> tuple[Net, Inputs]:
    """The net of a seed, in the default dtype; the same whenever seed and features are."""
    torch.manual_seed(seed)
    net, inputs = Maker(Random(seed), features).net()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:  # norms start at 1 and 0, which would hide mistakes
                parameter.add_(0.2 * torch.randn_like(parameter))
    return net, inputs
