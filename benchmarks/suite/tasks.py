"""The tasks of the suite: small models of many kinds, each about half a minute on one thread.

They were divided before any result was looked at: defaults are chosen on `CHOSEN`, and `REPORTED` only
shows what became of them. The tasks of `further` came later, and were divided in the same way.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kronfac.train import models
from suite import further, nets
from suite.problems import (
    Problem,
    autoencoder,
    classification,
    contrastive,
    images,
    language,
    motion,
)


@dataclass(frozen=True)
class Task:
    """How a problem is trained; `gradient` is the scale of its gradients, for SGD's rates."""

    name: str
    make: Callable[[], Problem]
    steps: int
    batch: int
    measure: str
    higher: bool = False
    gradient: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


# --- the tasks -----------------------------------------------------------------------------------

TOKEN = {"loss_average": "token"}
#: A sum over pixels has gradients that are some hundred times longer.
PIXELS = 100.0

CHOSEN = [
    Task(
        "digits MLP",
        lambda: classification(nets.mlp(64, 128, 64, 10), images("digits", test=None)),
        300,
        64,
        "accuracy",
        higher=True,
    ),
    Task(
        "Fashion-MNIST CNN",
        lambda: classification(
            models.build("cnn", num_classes=10, sample_shape=(1, 28, 28)), images("fashion-mnist")
        ),
        200,
        128,
        "accuracy",
        higher=True,
    ),
    Task(
        "Fashion-MNIST MLP, batch 16",
        lambda: classification(nets.mlp(784, 128, 128, 10), images("fashion-mnist")),
        1000,
        16,
        "accuracy",
        higher=True,
    ),
    Task(
        "CIFAR-10 ResNet-8",
        lambda: classification(
            models.build("resnet8", num_classes=10, sample_shape=(3, 32, 32)),
            images("cifar10", train=10_000),
            flip=True,
        ),
        160,
        128,
        "accuracy",
        higher=True,
    ),
    Task(
        "byte GPT",
        lambda: language(
            models.build(
                "gpt", num_classes=256, sample_shape=(64,), dim=96, depth=3, heads=4, tied=False
            ),
            64,
        ),
        160,
        16,
        "loss",
        options=TOKEN,
    ),
    Task(
        "autoencoder 400-25",
        lambda: autoencoder(784, 400, 200, 100, 25),
        200,
        250,
        "squared error",
        gradient=PIXELS,
    ),
    Task(
        "digits by rows, RNN",
        lambda: classification(nets.RowRNN(8, 96, 10), images("digits", test=None)),
        300,
        64,
        "accuracy",
        higher=True,
    ),
    Task(
        "Lorenz's system",
        lambda: motion(nets.lorenz(12_000), 3),
        800,
        256,
        "unexplained variance",
    ),
]

REPORTED = [
    Task(
        "autoencoder 1000-30",
        lambda: autoencoder(784, 1000, 500, 250, 30),
        120,
        250,
        "squared error",
        gradient=PIXELS,
    ),
    Task(
        "CIFAR-10 VGG, no norms",
        lambda: classification(nets.vgg(), images("cifar10", train=10_000), flip=True),
        200,
        64,
        "accuracy",
        higher=True,
    ),
    Task(
        "CIFAR-10 (all) ResNet-8",
        lambda: classification(
            models.build("resnet8", num_classes=10, sample_shape=(3, 32, 32)),
            images("cifar10"),
            flip=True,
        ),
        200,
        128,
        "accuracy",
        higher=True,
    ),
    Task(
        "CIFAR-10 ViT",
        lambda: classification(
            models.build(
                "vit", num_classes=10, sample_shape=(3, 32, 32), patch=4, dim=64, depth=3, heads=4
            ),
            images("cifar10", train=20_000),
            flip=True,
        ),
        200,
        64,
        "accuracy",
        higher=True,
    ),
    Task(
        "byte Llama, tied head",
        lambda: language(nets.Llama(96, 3, 4, tied=True), 64),
        160,
        16,
        "loss",
        options=TOKEN,
    ),
    Task(
        "byte Llama, untied head",
        lambda: language(nets.Llama(96, 3, 4, tied=False), 64),
        160,
        16,
        "loss",
        options=TOKEN,
    ),
    Task(
        "double pendulum",
        lambda: motion(nets.double_pendulum(12_000), 4),
        800,
        256,
        "unexplained variance",
    ),
    Task("contrastive", contrastive, 150, 128, "neighbours' accuracy", higher=True),
    Task(
        "MNIST MLP, batch 4096",
        lambda: classification(nets.mlp(784, 256, 256, 10), images("mnist")),
        60,
        4096,
        "accuracy",
        higher=True,
    ),
]

#: What is new is judged by these two first, and the rest shows what became of it.
FURTHER_CHOSEN = [
    Task("byte LSTM", further.byte_lstm, 200, 16, "loss", options=TOKEN),
    Task("denoising U-Net", further.denoiser, 150, 32, "squared error"),
]
FURTHER_REPORTED = [
    Task("Fashion-MNIST by rows, GRU", further.row_gru, 300, 64, "accuracy", higher=True),
    Task("variational autoencoder", further.variational, 200, 64, "bound", gradient=PIXELS),
    Task(
        "CIFAR-10 depthwise CNN",
        lambda: classification(further.mobile_net(), images("cifar10", train=10_000), flip=True),
        160,
        64,
        "accuracy",
        higher=True,
    ),
    Task(
        "CIFAR-10 ConvNeXt",
        lambda: classification(further.conv_next(), images("cifar10", train=10_000), flip=True),
        200,
        64,
        "accuracy",
        higher=True,
    ),
    Task("Poisson's equation", further.poisson, 400, 256, "relative error", gradient=PIXELS),
    Task("addition modulo 53", further.addition, 400, 128, "loss"),
    Task("rhythms, 1-D CNN", further.rhythms, 150, 64, "accuracy", higher=True),
]
FURTHER = [*FURTHER_CHOSEN, *FURTHER_REPORTED]
TASKS = {task.name: task for task in [*CHOSEN, *REPORTED, *FURTHER]}


def decayed(step: int, steps: int) -> float:
    """A warm-up of a tenth at most ten steps long, then linearly to zero."""
    warm = min(10, max(1, steps // 10))
    return min(1.0, (step + 1) / warm) * (steps - step) / steps


def constant(step: int, steps: int) -> float:
    return 1.0


SCHEDULES = {"decay": decayed, "constant": constant}


def is_bad(value: float) -> bool:
    return not math.isfinite(value)
