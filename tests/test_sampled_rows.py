"""``rows``: statistics of some rows are those of exactly these rows, and in expectation those of all."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD

import kronfac
from kronfac.layers.rows import DenseRows, MapRows, PatchRows
from kronfac.linalg.patches import Window
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.sampled import Stride
from kronfac.step.sampled_rows import fix_stride
from tests.training import (
    assert_close,
    assert_same,
    counts,
    factors,
    kfac,
    layers,
    saved_and_loaded,
    snapshot,
)

pytestmark = pytest.mark.usefixtures("double_precision")

CLASSES = 3


# --- models whose layers have more than 4,096 rows ------------------------------------------------


class Pictures(nn.Module):
    """Convolutions with strides over samples (3x3), and over positions too (1x1 and 2x2 patches)."""

    samples, shape = 32, (2, 24, 24)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.mix = nn.Conv2d(2, 2, 1)
        self.grouped = nn.Conv2d(2, 4, 2, stride=2, padding=1, groups=2, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.grouped(torch.tanh(self.mix(torch.tanh(self.first(x))))))
        return self.head(torch.tanh(x).mean((2, 3)))


class Words(nn.Module):
    """Linear layers and attention on ``[N, S, d]``, and a linear layer on ``[N·S, d]``."""

    samples, shape = 64, (150, 2)

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.up = nn.Linear(2, 3)
        self.flat = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.tanh(self.up(x))
        return self.flat(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)


Model = Pictures | Words
MODELS: list[type[Model]] = [Pictures, Words]


def batch(kind: type[Model], number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(kind.samples, *kind.shape, generator=generator)
    return x, torch.randint(CLASSES, (kind.samples,), generator=generator)


def step(
    model: nn.Module, optimizer: Any, data: tuple[Tensor, Tensor], micro: int = 1, **observe: Any
) -> None:
    optimizer.zero_grad()
    for x, y in zip(*(part.chunk(micro) for part in data), strict=True):
        scores = model(x)
        if observe:
            optimizer.observe(scores, **observe)
        (F.cross_entropy(scores, y) / micro).backward()
    optimizer.step()


def trained(kind: type[Model], steps: int = 2, micro: int = 1, **options: Any) -> Any:
    """The optimizer after some steps; the base does not move."""
    torch.manual_seed(0)
    model = kind()
    optimizer = kfac(model, SGD(model.parameters(), lr=0.0), decay=0.0, **options)
    for number in range(steps):
        step(model, optimizer, batch(kind, number), micro)
    return optimizer


# --- by hand ----------------------------------------------------------------------------------------


def chosen_rows(a: Tensor, stride: tuple[int, int], number: int) -> Tensor:
    """Rows ``[*b, N, S, d]`` of one whole step that a stride chooses, ``[*b, R, d]``, one by one."""
    samples, positions = stride
    start = math.floor(samples * math.fmod(number * (math.sqrt(5) - 1) / 2, 1))
    found = []
    for index, sample in enumerate(range(start, a.shape[-3], samples)):
        size = a.shape[-2]
        begin = math.floor(size * math.fmod(number * (math.sqrt(2) - 1), 1)) if positions > 1 else 0
        for turn in range(size // positions):
            where = begin + index + turn * positions if positions > 1 else turn
            found.append(a[..., sample, where % size, :])
    return torch.stack(found, dim=-2)


def seen_rows(optimizer: Any, data: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """All rows of both sides of each layer, with per-sample gradients of the mean loss."""
    model, found = optimizer.model, {}
    known = {state.layer.key: state.name for state in optimizer.layers}
    sides: dict[str, Any] = {}

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        def see(part: str, inputs: tuple[Any, ...], product: Tensor) -> Tensor:
            name = next((n for (_, p), n in own.items() if p == part), None)
            if name is not None:
                product.retain_grad()
                sides[name] = inputs, product
            return product

        mine = [state.layer for state in optimizer.layers if state.layer.module is module]
        own = {layer.key: known[layer.key] for layer in mine}
        return mine[0].split(see, module, args, kwargs, output)

    modules = [s.layer.module for s in optimizer.layers if s.block.leaves_out == "rows"]
    handles = [one.register_forward_hook(hook, with_kwargs=True) for one in dict.fromkeys(modules)]
    with optimizer.no_capture():
        F.cross_entropy(model(data[0]), data[1]).backward()
    for handle in handles:
        handle.remove()
    for name, (inputs, product) in sides.items():
        layer = layers(optimizer)[name].layer
        found[name] = layer.inputs(inputs).dense(), layer.outputs(product.grad).dense()
    return found


def moment(rows: Tensor) -> Tensor:
    return rows.mT @ rows


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("number", [1, 2])
def test_statistics_are_those_of_the_chosen_rows(kind: type[Model], number: int) -> None:
    optimizer = trained(kind, steps=number + 1, rows=4096)
    strides = set()
    for name, (a, g) in seen_rows(optimizer, batch(kind, number)).items():
        state = layers(optimizer)[name]
        stride = (state.stride.samples, state.stride.positions)
        strides.add(stride)
        chosen, whole = chosen_rows(a, stride, number), a.shape[-3] * a.shape[-2]
        rows = chosen.shape[-2]
        assert min(4096, whole) <= rows < 3 * 4096
        samples = kind.samples
        assert_close(state.running["A"].sum, moment(chosen))
        assert float(state.running["A"].count) == rows
        assert_close(state.running["G"].sum, samples**2 * moment(chosen_rows(g, stride, number)))
        assert float(state.running["G"].count) == pytest.approx(samples * rows / whole)
    assert any(samples > 1 for samples, _ in strides)
    assert kind is Words or any(positions > 1 for _, positions in strides)


def test_the_first_factor_step_and_small_batches_see_every_row() -> None:
    for options, steps in (({"rows": 4096}, 1), ({"rows": None}, 2), ({"rows": 16384}, 2)):
        optimizer = trained(Pictures, steps=steps, **options)
        assert counts(optimizer, "A")["grouped"] == 32 * 169
        assert counts(optimizer, "G")["grouped"] == 32
    assert counts(trained(Pictures, rows=4096), "A")["head"] == 32


def test_only_second_moments_of_matrices_leave_rows_out() -> None:
    optimizer = trained(Pictures, rows=4096)
    assert counts(optimizer, "F") == {"norm": 32}
    torch.manual_seed(0)
    model = Words()
    ekfac = kronfac.EKFAC(model, SGD(model.parameters(), lr=0.0), factor_every=1, decay=0.0)
    for number in range(2):
        step(model, ekfac, batch(Words, number))
    assert counts(ekfac, "A")["up"] == 64 * 150  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", ["dense", "diagonal"])
def test_singd_leaves_rows_out_as_kfac_does(structure: str) -> None:
    torch.manual_seed(0)
    model = Words()
    base = SGD(model.parameters(), lr=0.0)
    singd = kronfac.SINGD(model, base, structure=structure, factor_every=1, rows=4096)  # type: ignore[arg-type]
    for number in range(2):
        step(model, singd, batch(Words, number))
    for side in ("A", "G"):
        found, expected = counts(singd, side), counts(trained(Words, rows=4096), side)  # type: ignore[arg-type]
        assert found == expected


def test_an_embedding_counts_every_token() -> None:
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 3))
    optimizer = kfac(model, SGD(model.parameters(), lr=0.0), decay=0.0, rows=4096)
    tokens = torch.arange(64 * 200).reshape(64, 200) % 5
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens).square().sum().div(64).backward()
        optimizer.step()
    assert counts(optimizer, "A") == {"0": 64 * 200, "1": 21 * 200}


def test_reduce_leaves_whole_samples_out() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, CLASSES)
    optimizer = kfac(model, SGD(model.parameters(), lr=0.0), decay=0.0, rows=4096, sharing="reduce")
    x = torch.randn(9000, 5, 2)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().sum().div(9000).backward()
        optimizer.step()
    state = layers(optimizer)[""]
    assert (state.stride.samples, state.stride.positions) == (2, 1)
    start = math.floor(2 * math.fmod((math.sqrt(5) - 1) / 2, 1))
    a = F.pad(x.mean(1), (0, 1), value=1.0)[start::2]
    g = 2 * model(x).detach().sum(1)[start::2]
    assert_close(state.running["A"].mean(), moment(a) / 4500)
    assert_close(state.running["G"].mean(), moment(g) / 4500)


# --- expectation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "positions"), [(3, 1), (1, 4), (3, 4), (2, 5)])
def test_the_mean_over_all_offsets_is_the_full_statistic(samples: int, positions: int) -> None:
    x = torch.randn(6, 2, 3, 7)
    window = Window((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)))
    for rows in (PatchRows(x, window, ones=True), MapRows(x, 1)):
        total, number = torch.zeros_like(rows.covariance()), 0
        for first in range(samples):
            chosen = rows.every(first, samples)
            for start in range(rows.positions):
                some = chosen.some_positions(start, positions) if positions > 1 else chosen
                total += some.covariance()
                number += some.samples * some.positions
        assert_close(total / number, rows.covariance() / (6 * 21))


def test_any_kind_of_rows_gives_the_chosen_ones() -> None:
    x = torch.randn(5, 4, 6, 7)
    window = Window((3, 2), (2, 1), (1, 2), ((1, 0), (2, 1)), groups=2)
    for rows in (PatchRows(x, window, ones=True), MapRows(x, 2), DenseRows(x, ones=True)):
        dense = DenseRows(rows.dense())
        for some, all_of_them in (
            (rows.every(1, 2), dense.every(1, 2)),
            (rows.some_positions(4, 3), dense.some_positions(4, 3)),
            (rows.every(1, 3).some_positions(2, 2), dense.every(1, 3).some_positions(2, 2)),
        ):
            assert_close(some.dense(), all_of_them.dense())
            assert_close(some.covariance(), all_of_them.covariance())


def test_steps_start_everywhere() -> None:
    stride, rows = Stride(4096, 4, 1), DenseRows(torch.arange(8.0).reshape(8, 1, 1))
    for every in (1, 4, 10):
        taken = [stride.choose(rows, Pass(8, 0, every * turn)) for turn in range(40)]
        first = [int(one.dense()[0, 0, 0]) for one in taken if one is not None]
        assert [first.count(start) for start in range(4)] == pytest.approx([10] * 4, abs=2)


def test_strides_go_by_rows_and_leave_enough_samples() -> None:
    def strides(rows: int, samples: int, target: int = 4096, **kind: bool) -> tuple[int, int]:
        found = fix_stride(target, rows, samples, samples, **kind)
        return found.samples, found.positions

    assert strides(4096, 128) == strides(8191, 128) == (1, 1)
    assert strides(128 * 1024, 128) == (8, 4)
    assert strides(128 * 1024, 128, overlaps=True) == (8, 1)
    assert strides(32 * 12544, 32, overlaps=True) == (2, 49)
    assert strides(128 * 256, 128) == (8, 1)
    assert strides(128 * 64, 128, 4616) == (2, 1)  # nearly 4,616 rows, and no fewer than 4,096
    assert strides(128 * 64, 128) == (2, 1)
    assert strides(8 * 4096, 8) == (1, 8)
    assert strides(20_000, 20_000) == (4, 1)
    assert strides(0, 0) == (1, 1)


# --- splits, loops and losses -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("micro", [2, 8, pytest.param("each", marks=pytest.mark.slow)])
def test_micro_batches_choose_what_a_whole_batch_does(kind: type[Model], micro: Any) -> None:
    micro = kind.samples if micro == "each" else micro
    one, several = trained(kind, rows=4096), trained(kind, micro=micro, rows=4096)
    for side in ("A", "G"):
        assert counts(several, side) == pytest.approx(counts(one, side))
        assert_close(factors(several, side), factors(one, side))


def test_sampled_gradients_and_token_losses() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, CLASSES))
    x, y = torch.randn(64, 200, 2), torch.randint(CLASSES, (64, 200))
    y[:, 150:] = -100
    for options in ({"loss_average": "token"}, {"fisher": "exact", "loss_average": "token"}):
        optimizer = kfac(model, SGD(model.parameters(), lr=0.0), decay=0.0, rows=4096, **options)
        for _ in range(2):
            optimizer.zero_grad()
            scores = model(x)
            if optimizer.needs_observe:
                optimizer.observe(scores, ignore_index=-100, mask=y)
            F.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100).backward()
            optimizer.step()
        start = math.floor(3 * math.fmod((math.sqrt(5) - 1) / 2, 1))
        some = model(x)[start::3].softmax(-1).detach()
        labels = F.one_hot(y.clamp(min=0), CLASSES)[start::3]
        hits = (y != -100)[start::3, :, None]
        if "fisher" in options:
            fisher = (torch.diag_embed(some) - some[..., None] * some[..., None, :]) * hits[
                ..., None
            ]
            expected = fisher.sum((0, 1))
        else:
            expected = moment(((some - labels) * hits).flatten(0, 1))
        rows = some.shape[0] * 200
        count = 64 * 150 * rows / (64 * 200)
        assert counts(optimizer, "A")["0"] == rows
        assert counts(optimizer, "G")["0"] == pytest.approx(count)
        assert_close(factors(optimizer, "G")["0"], expected / count)
        optimizer.detach()


@pytest.mark.slow
def test_compiled_models_choose_the_same_rows() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Words()
    optimizer = kfac(model, SGD(model.parameters(), lr=0.0), decay=0.0, rows=4096)
    compiled = torch.compile(model, backend="aot_eager")
    for number in range(2):
        step(compiled, optimizer, batch(Words, number))
    eager = trained(Words, rows=4096)
    for side in ("A", "G"):
        assert counts(optimizer, side) == counts(eager, side)
        assert_close(factors(optimizer, side), factors(eager, side))
    torch._dynamo.reset()


# --- saving -----------------------------------------------------------------------------------------


def moving(kind: type[Model], **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = kind()
    return model, kfac(model, SGD(model.parameters(), lr=0.01), **options)


@pytest.mark.parametrize("kind", MODELS)
def test_resume_is_bit_for_bit(kind: type[Model]) -> None:
    model, optimizer = moving(kind, rows=4096)
    for number in range(3):
        step(model, optimizer, batch(kind, number))
    saved = saved_and_loaded({"model": model.state_dict(), "optimizer": snapshot(optimizer)})
    other, resumed = moving(kind, rows=4096)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for number in range(3, 5):
        step(model, optimizer, batch(kind, number))
        step(other, resumed, batch(kind, number))
    assert_same(snapshot(resumed), snapshot(optimizer))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_resume_through_distributed_checkpoints() -> None:
    model, optimizer = moving(Pictures, rows=4096)
    for number in range(2):
        step(model, optimizer, batch(Pictures, number))
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    other, resumed = moving(Pictures, rows=4096)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, state)
    step(model, optimizer, batch(Pictures, 2))
    step(other, resumed, batch(Pictures, 2))
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


def test_strides_are_fixed_again_where_other_rows_are_wanted_or_none_were_saved() -> None:
    model, optimizer = moving(Pictures, rows=4096)
    for number in range(2):
        step(model, optimizer, batch(Pictures, number))
    saved = snapshot(optimizer)
    old = copy.deepcopy(saved)
    for entry in old["state"].values():
        for key in [key for key in entry if key.endswith("stride")]:
            del entry[key]
    for state, rows, positions in ((saved, None, 0), (saved, 8192, 1), (old, 4096, 2)):
        model, other = moving(Pictures, rows=rows, decay=0.0)
        other.load_state_dict(state)
        assert layers(other)["mix"].stride is None
        step(model, other, batch(Pictures, 2))
        assert counts(other, "A")["mix"] == 32 * 576  # fixed from all rows
        step(model, other, batch(Pictures, 3))
        stride = layers(other)["mix"].stride
        assert (0 if stride is None else stride.positions) == positions


# --- what users see ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 4095, 4096.5, -1, True, "all", math.nan])
def test_too_few_rows_are_refused(rows: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^rows=.*'auto', a whole number of at least 4096, or None"
    ):
        moving(Words, rows=rows)


def test_the_summary_says_what_is_left_out() -> None:
    optimizer = trained(Pictures, rows=4096)
    text = optimizer.summary()
    assert "Statistics take about 4,096 rows of a layer.\n" in text
    assert "  1 of 2 samples: first\n  1 of 2 samples, 1 of 2 positions: mix\n" in text
    assert "grouped\n" not in text  # 5,408 rows are hardly more
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "rows" not in trained(Pictures, rows=None).summary()


def test_rows_without_effect_are_said() -> None:
    model = Words()
    with pytest.warns(UserWarning, match="rows=5000 has no effect with Eva, whose statistics need"):
        kronfac.Eva(model, SGD(model.parameters(), lr=0.1), rows=5000)
