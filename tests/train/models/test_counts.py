"""Parameter counts against the papers and the definitions that people use; nothing is allocated."""

import pytest
import torch

from kronfac.train import models


def count(name, **options):
    with torch.device("meta"):
        model = models.build(name, **options)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(8, 75_290), (20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_cifar_resnets(depth, parameters):
    """He et al., table 6: 0.27M, 0.46M, 0.66M, 0.85M and 1.7M."""
    assert count(f"resnet{depth}", num_classes=10, sample_shape=(3, 32, 32)) == parameters


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)],
)
def test_imagenet_resnets(depth, parameters):
    assert count(f"resnet{depth}", num_classes=1000, sample_shape=(3, 224, 224)) == parameters


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"dim": 192, "heads": 3}, 5_717_416),
        ({"dim": 384, "heads": 6}, 22_050_664),
        ({}, 86_567_656),
    ],
)
def test_vision_transformers(options, parameters):
    """ViT-Ti, S and B with patches of 16 x 16 pixels."""
    assert count("vit", num_classes=1000, sample_shape=(3, 224, 224), **options) == parameters


def test_gpt2_small():
    options = {"dim": 768, "depth": 12, "heads": 12}
    assert count("gpt", num_classes=50257, sample_shape=(1024,), **options) == 124_439_808
    untied = count("gpt", num_classes=50257, sample_shape=(1024,), tied=False, **options)
    assert untied == 124_439_808 + 50257 * 768


def test_small_networks():
    digits = {"num_classes": 10, "sample_shape": (1, 8, 8)}
    assert count("mlp", hidden=[32], **digits) == 65 * 32 + 33 * 10
    assert count("mlp", hidden=[], **digits) == 65 * 10
    expected = (9 + 2) * 4 + (9 * 4 + 2) * 8 + 9 * 10
    assert count("cnn", width=4, stages=2, **digits) == expected
