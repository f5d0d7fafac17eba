"""Models by name: shapes, options, what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kronfac.runs.errors import UserError
from kronfac.train import models
from kronfac.train.models.resnet import CifarBlock

IMAGES = {"num_classes": 10, "sample_shape": (3, 32, 32)}
TEXT = {"num_classes": 50, "sample_shape": (12,)}


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet8", "resnet18", "vit"])
def test_images_become_logits(name, shape):
    options = {"vit": {"patch": 4, "dim": 8, "depth": 1, "heads": 2}, "resnet18": {"width": 4}}
    model = models.build(name, num_classes=7, sample_shape=shape, **options.get(name, {}))
    assert model(torch.randn(2, *shape)).shape == (2, 7)


def test_bottlenecks_halve_the_resolution_in_their_3x3_convolution():
    model = models.build("resnet50", width=2, **IMAGES)
    strides = [conv.stride for conv in model.stages[1][0].convs]
    assert strides == [(1, 1), (2, 2), (1, 1)]
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 10)


def test_every_token_gets_logits_from_those_before_it():
    model = models.build("gpt", dim=16, depth=2, heads=2, **TEXT)
    ids = torch.randint(50, (3, 12))
    logits = model(ids)
    assert logits.shape == (3, 12, 50)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    differs = (model(changed) - logits).abs().amax((0, 2)) > 1e-6
    assert differs.tolist() == [False] * 7 + [True] * 5


def test_shorter_sequences_are_fine():
    model = models.build("gpt", dim=16, depth=1, heads=2, **TEXT)
    assert model(torch.randint(50, (3, 5))).shape == (3, 5, 50)


def test_the_head_of_the_gpt_can_be_its_own():
    tied = models.build("gpt", dim=16, depth=1, heads=2, **TEXT)
    assert tied.head.weight is tied.tokens.weight
    untied = models.build("gpt", dim=16, depth=1, heads=2, tied=False, **TEXT)
    assert untied.head.weight is not untied.tokens.weight


def test_the_shortcut_of_option_a_samples_and_pads():
    block = CifarBlock(4, 8, 2).eval()
    nn.init.zeros_(block.norm2.weight)
    x = torch.rand(2, 4, 6, 6)
    expected = torch.zeros(2, 8, 3, 3)
    expected[:, 2:6] = x[:, :, ::2, ::2]
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize(
    ("name", "stage", "first", "last"),
    [
        ("resnet8", "stage2.0.", "conv1.weight", "norm2.num_batches_tracked"),
        ("resnet50", "stages.1.0.", "convs.0.weight", "shortcut.1.num_batches_tracked"),
    ],
)
def test_checkpoints_name_the_parts_of_a_block(name, stage, first, last):
    state = models.build(name, width=2, **IMAGES).state_dict()
    names = [key.removeprefix(stage) for key in state if key.startswith(stage)]
    assert (names[0], names[-1]) == (first, last)


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "resnet50"])
def test_zero_init_makes_every_block_an_identity(name):
    model = models.build(name, width=4, zero_init=True, **IMAGES)
    last = {"resnet20": "norm2", "resnet18": "norms.1", "resnet50": "norms.2"}[name]
    found = [p for n, p in model.named_parameters() if n.endswith(f"{last}.weight")]
    assert len(found) == {"resnet20": 9, "resnet18": 8, "resnet50": 16}[name]
    assert all(not scale.any() for scale in found)


def test_the_variance_of_a_deep_gpt_does_not_grow_with_depth():
    torch.manual_seed(0)
    model = models.build("gpt", dim=64, depth=8, heads=2, **TEXT)
    assert model.blocks[0].down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].up.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_fresh_model_is_undecided():
    """The loss starts near that of guessing, so that no learning rate is spent on undoing it."""
    torch.manual_seed(0)
    model = models.build("gpt", dim=32, depth=2, heads=2, **TEXT)
    ids, targets = torch.randint(50, (2, 8, 12))
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(torch.tensor(50.0).log().item(), rel=0.05)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("resnet19", {}, r"unknown model 'resnet19'; there are mlp, cnn, resnet8"),
        ("resnet20", {"widht": 3}, r"unknown option model\.widht: resnet20 has width, zero_init"),
        ("resnet20", {"channels": 3}, r"unknown option model\.channels"),
        ("resnet20", {"width": 0}, r"model\.width = 0 is not a whole number from 1"),
        ("resnet20", {"width": 1.5}, r"model\.width = 1\.5 is not a whole number"),
        ("resnet20", {"zero_init": 1}, r"model\.zero_init = 1 is not true or false"),
        ("mlp", {"hidden": 3}, r"model\.hidden = 3 is not a list of whole numbers"),
        ("mlp", {"hidden": [3, 0]}, r"model\.hidden = \[3, 0\] is not a list"),
        ("vit", {"patch": 5}, r"images of 32 x 32 pixels cannot be cut into patches of 5 x 5"),
        ("vit", {"dim": 10, "heads": 3}, r"the width 10 cannot be shared by 3 attention heads"),
        ("cnn", {"stages": 7}, r"images of 32 x 32 pixels are too small for 7 stages"),
        (
            "gpt",
            {},
            r"gpt wants text, samples of \[S\], but this data has samples of \[3, 32, 32\]",
        ),
    ],
)
def test_what_cannot_be_built_is_refused(name, options, sentence):
    with pytest.raises(UserError, match=sentence):
        models.build(name, **IMAGES, **options)


@pytest.mark.parametrize("name", ["resnet20", "mlp"])
def test_image_models_refuse_text(name):
    with pytest.raises(UserError, match=rf"{name} wants images, samples of \[C, H, W\]"):
        models.build(name, **TEXT)
