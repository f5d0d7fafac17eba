"""The summary says what is done with every parameter, and how much memory it takes."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD

import kronfac
from kronfac.optimizer.summary import _bytes
from tests.training import batch, cnn, images, kfac, layers, mlp, option_id, step


class Everything(nn.Module):
    """Layers of every kind: supported, not supported, frozen, tied, lazy and bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(7, 4)
        self.stem = nn.Conv2d(2, 4, 3, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.ConvTranspose2d(4, 2, 2)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.cell = nn.LSTM(4, 4)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.waves = nn.Linear(4, 4, dtype=torch.complex64)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def sections(summary: str) -> tuple[set[str], dict[str, str]]:
    """Layers of the table, and the reason of every parameter that is left out."""
    reasons: dict[str, str] = {}
    table: set[str] = set()
    reason = ""
    head, _, tail = summary.partition("Not preconditioned")
    for line in head.splitlines():
        if re.search(r"\d+ x \d+", line):
            table.add(line.split()[0])
    for line in tail.splitlines()[1:]:
        if line.startswith("    "):
            reasons |= dict.fromkeys(line.split(), reason)
        else:
            reason = line.strip().removesuffix(":")
    return table, reasons


def test_every_parameter_is_in_the_table_or_listed_with_a_reason() -> None:
    model = Everything()
    table, reasons = sections(kfac(model).summary())
    for name, _ in model.named_parameters(remove_duplicate=False):
        layer = name.rpartition(".")[0]
        tied = name in ("embedding.weight", "head.weight") and "head" in table
        known = layer in table or (
            name.startswith("attention.in_proj") and "attention.key" in table
        )
        assert tied or known != (name in reasons), name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scale", "Everything is not a known layer type"),
        ("up.weight", "ConvTranspose2d is not a supported layer type"),
        ("cell.weight_ih_l0", "LSTM computes all time steps"),
        ("attention.bias_k", "MultiheadAttention does not multiply by it"),
        ("normed.bias", "its parameters are parametrized"),
        ("waves.weight", "its weight is complex"),
        ("frozen.weight", "frozen"),
        ("frozen.bias", "frozen"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    assert sections(kfac(Everything()).summary())[1][name].startswith(reason)


@pytest.mark.parametrize(
    ("options", "reason"), [({"exclude": "2"}, "in exclude"), ({"include": "0"}, "not in include")]
)
def test_the_users_own_choice_is_a_reason(options: dict[str, Any], reason: str) -> None:
    assert sections(kfac(mlp(), **options).summary())[1]["2.weight"] == reason


def test_a_parameter_that_the_base_optimizer_does_not_have_is_listed() -> None:
    model = mlp()
    optimizer = kfac(model, SGD(model[0].parameters(), lr=0.1))
    assert sections(optimizer.summary())[1]["2.weight"] == "not given to the base optimizer"


def test_a_frozen_bias_is_listed_beside_its_layer() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    table, reasons = sections(kfac(model).summary())
    assert "0" in table
    assert reasons == {"0.bias": "frozen"}


def test_a_bias_beside_a_frozen_weight_is_listed_with_a_true_reason() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    reasons = sections(kfac(model).summary())[1]
    assert reasons["0.weight"] == "frozen"
    assert "not a parameter of the model" not in reasons["0.bias"]


def test_a_lazy_layer_is_listed_before_it_is_initialised() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="layers '0' are lazy"):
        optimizer = kfac(model)
    assert "lazy" in sections(optimizer.summary())[1]["0.weight"]


@pytest.mark.filterwarnings("ignore:no layer of the Linear is preconditioned")
def test_a_weight_computed_by_weight_norm_is_listed() -> None:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(4, 3))
    assert "computed" in sections(kfac(layer).summary())[1]["weight_g"]


@pytest.mark.filterwarnings("ignore:no layer of the Sequential is preconditioned")
def test_a_subclass_with_its_own_forward_is_listed() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    reasons = sections(kfac(nn.Sequential(Doubled(4, 3))).summary())[1]
    assert reasons["0.weight"] == "it overrides Linear.forward"


def test_nothing_left_out_is_said_too() -> None:
    assert kfac(mlp()).summary().endswith("No parameter is left out.")


def test_a_parameter_from_outside_the_model_is_listed() -> None:
    model = mlp()
    temperature = nn.Parameter(torch.ones(1))
    optimizer = kfac(model, SGD([*model.parameters(), temperature], lr=0.1))
    assert "not a parameter of the model" in optimizer.summary()


# --- notes -----------------------------------------------------------------------------------


def test_a_side_wider_than_max_dim_is_shown_as_its_diagonal() -> None:
    model = nn.Sequential(nn.Linear(4, 9))
    assert "G diag" in kfac(model, max_dim=8).summary()


def test_forward_only_curvature_is_shown() -> None:
    assert "G = I" in kfac(mlp(), fisher="forward").summary()


def test_rows_that_cannot_be_grouped_by_sample_are_noted_by_name() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.tokens(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1))

    model = Flat()
    optimizer = kfac(model, sharing="reduce")
    step(model, optimizer, batch(shape=(2, 4)))
    notes = optimizer.summary().partition("Notes:\n")[2]
    assert notes.startswith("  tokens: expand")
    assert "head" not in notes.splitlines()[0]


def test_a_weight_with_a_second_role_is_noted() -> None:
    # Its curvature is that of the linear use only.
    notes = kfac(Everything()).summary().partition("Notes:\n")[2]
    assert "embedding" in notes


def test_repr_is_the_summary() -> None:
    optimizer = kfac(mlp())
    assert repr(optimizer) == optimizer.summary()


def test_the_title_counts_steps() -> None:
    model = mlp()
    optimizer = kfac(model)
    step(model, optimizer, batch())
    assert optimizer.summary().startswith("KFAC over SGD, step 1\n")


# --- width -----------------------------------------------------------------------------------


def residual_network() -> nn.Module:
    stages = nn.ModuleDict()
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.ModuleDict(
                {
                    "conv1": nn.Conv2d(width, width, 3, bias=False, device="meta"),
                    "bn1": nn.BatchNorm2d(width, device="meta"),
                    "depthwise": nn.Conv2d(width, width, 3, groups=width, device="meta"),
                }
            )
            blocks.append(block)
        stages[f"layer{stage}"] = blocks
    stages["fc"] = nn.Linear(512, 1000, device="meta")
    return stages


def language_model() -> nn.Module:
    layers_of = nn.ModuleList()
    for _ in range(2):
        attention = nn.ModuleDict({"query": nn.Linear(768, 768, device="meta")})
        block = nn.ModuleDict(
            {
                "attention": nn.ModuleDict({"self": attention}),
                "intermediate_projection": nn.Linear(768, 3072, device="meta"),
                "output_layer_normalisation": nn.LayerNorm(768, device="meta"),
            }
        )
        layers_of.append(block)
    encoder = nn.ModuleDict({"layer": layers_of})
    head = nn.Linear(768, 50257, device="meta")
    return nn.ModuleDict({"bert": nn.ModuleDict({"encoder": encoder}), "lm_head": head})


def torch_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, device="meta")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "cnn": cnn,
    "residual": residual_network,
    "language": language_model,
    "transformer": torch_transformer,
    "everything": Everything,
}


def widest(summary: str) -> int:
    return max(map(len, summary.splitlines()))


@pytest.mark.parametrize("solver", ["auto", "cholesky", "newton-schulz"])
@pytest.mark.parametrize("model", MODELS)
def test_realistic_models_fit_into_80_columns(model: str, solver: str) -> None:
    assert widest(kfac(MODELS[model](), solver=solver).summary()) <= 80


def test_notes_fit_into_80_columns() -> None:
    optimizer = kfac(language_model(), sharing="reduce")
    for state in layers(optimizer).values():
        state.fall_back_to_expand()
    assert widest(optimizer.summary()) <= 80


def test_construction_allocates_nothing_for_a_large_model() -> None:
    optimizer = kfac(nn.Linear(100_000, 100_000, device="meta"))
    state = layers(optimizer)[""]
    assert state.solution is None
    assert all(running.sum is None for running in state.running.values())


# --- memory ----------------------------------------------------------------------------------


def held_bytes(optimizer: kronfac.KFAC) -> int:
    """Bytes of everything that layers keep from step to step, but for a few counters."""
    total = 0
    for state in layers(optimizer).values():
        kept = [running.sum for running in state.running.values()]
        kept += [*state.solution.values(), *state.buffers.values()]
        total += sum(tensor.nbytes for tensor in kept if tensor is not None)
    return total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"solver": "cholesky"},
        {"solver": "newton-schulz"},
        {"max_dim": 8},
        {"max_dim": 8, "solver": "cholesky"},
        {"fisher": "forward"},
        {"sharing": "reduce"},
        {"momentum": 0.9},
    ],
    ids=option_id,
)
def test_the_memory_printed_before_training_is_what_is_held_after_steps(
    options: dict[str, Any],
) -> None:
    model = cnn()
    optimizer = kfac(model, **options)
    printed = re.search(r"([\d.]+ \w?B) for statistics", optimizer.summary())
    for number in range(2):
        step(model, optimizer, images(number))
    assert printed is not None
    assert printed[1] == _bytes(held_bytes(optimizer))
