"""transformers.Trainer ends with the same parameters as the plain loop that it stands for."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import (
    BertModel,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import kronfac
from kronfac.huggingface import optimizer_cls_and_kwargs
from tests.integrations.language_model import (
    bert_config,
    llama,
    opt,
    sentences,
    stacked,
    tiny_config,
)
from tests.training import assert_close, assert_same, counts, differs, mlp, parameters

STEPS, SAMPLES = 6, 8
OPTIONS = {"damping": 0.01, "factor_every": 1, "refresh_every": 2, "rescale": None}


class InOrder(Trainer):
    """Takes the sentences in their order, so that a loop can follow."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def trained(
    folder: Path,
    model: PreTrainedModel | None = None,
    base: Any = SGD,
    factory: dict[str, Any] | None = None,
    resume: str | None = None,
    rows: list[dict[str, Tensor]] | None = None,
    loss_is_scaled: bool | None = None,
    **arguments: Any,
) -> Trainer:
    model = model or llama()
    chosen = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": SAMPLES,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    } | arguments
    trainer = InOrder(
        model,
        TrainingArguments(**chosen),
        train_dataset=rows or sentences(STEPS * SAMPLES),
        eval_dataset=sentences(SAMPLES),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(
            model, base, lr=0.1, **(OPTIONS | (factory or {}))
        ),
    )
    trainer.loss_is_scaled_for_ga = loss_is_scaled
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def plain_loop(
    clip: float | None = None, base: Any = SGD, decay: float = 0.0, autocast: bool = False
) -> LlamaForCausalLM:
    model = llama()
    without = [p for n, p in model.named_parameters() if "norm" in n]
    others = [p for n, p in model.named_parameters() if "norm" not in n]
    groups = [
        {"params": others, "weight_decay": decay},
        {"params": without, "weight_decay": 0.0},
    ]
    optimizer = kronfac.KFAC(model, base(groups, lr=0.1), loss_average="token", **OPTIONS)  # type: ignore[arg-type]
    scheduler = LambdaLR(optimizer, lambda step: (STEPS - step) / STEPS)
    rows = sentences(STEPS * SAMPLES)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(**stacked(rows[step * SAMPLES : (step + 1) * SAMPLES])).loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return model


def inner(trainer: Trainer) -> kronfac.KFAC:
    """The optimizer inside Accelerate's wrapper."""
    assert isinstance(trainer.optimizer, AcceleratedOptimizer)
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, kronfac.KFAC)
    return optimizer


def assert_equal(left: Any, right: Any) -> None:
    """Equal up to rounding: Llama's norms and losses work in single precision whatever the model is."""
    torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)


@pytest.fixture(autouse=True)
def _double(double_precision: None) -> None:
    """Equal formulas give equal numbers."""


# --- training --------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [SGD, AdamW])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_training_equals_the_plain_loop(base: Any, decay: float, tmp_path: Path) -> None:
    trainer = trained(tmp_path, base=base, weight_decay=decay)
    assert_equal(parameters(trainer.model), parameters(plain_loop(base=base, decay=decay)))


def test_the_learning_rate_follows_trainers_schedule(tmp_path: Path) -> None:
    assert {group["lr"] for group in trained(tmp_path).optimizer.param_groups} == {0.0}


def test_gradients_are_clipped_before_they_are_preconditioned(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_grad_norm=0.1)
    assert_equal(parameters(trainer.model), parameters(plain_loop(clip=0.1)))


@pytest.mark.parametrize("base", [SGD, AdamW])
@pytest.mark.parametrize("pieces", [2, 4])
def test_accumulated_micro_batches_equal_one_batch(base: Any, pieces: int, tmp_path: Path) -> None:
    # Micro-batches have different numbers of labels: Trainer divides by those of the whole step.
    trainer = trained(
        tmp_path,
        base=base,
        per_device_train_batch_size=SAMPLES // pieces,
        gradient_accumulation_steps=pieces,
    )
    assert_equal(parameters(trainer.model), parameters(trained(tmp_path, base=base).model))
    assert_equal(parameters(trainer.model), parameters(plain_loop(base=base)))


def double_loss(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """The loss of causal language models, without their rounding to single precision."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(logits, labels)
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("base", [SGD, AdamW])
def test_in_double_precision_throughout_they_are_equal_to_many_digits(
    base: Any, tmp_path: Path
) -> None:
    def train(pieces: int) -> PreTrainedModel:
        model = opt()
        model.loss_function = double_loss
        size = SAMPLES // pieces
        return trained(
            tmp_path,
            model,
            base,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=pieces,
        ).model

    assert_close(parameters(train(2)), parameters(train(1)))


@pytest.mark.parametrize("pieces", [1, 2])
def test_terms_are_the_labelled_tokens(pieces: int, tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        factory={"decay": 0.0},
        per_device_train_batch_size=SAMPLES // pieces,
        gradient_accumulation_steps=pieces,
    )
    labels = stacked(sentences(STEPS * SAMPLES)[-SAMPLES:])["labels"]
    expected = int((labels[:, 1:] != -100).sum())
    assert set(counts(inner(trainer), "G").values()) == {expected}


def test_samples_would_be_the_wrong_average(tmp_path: Path) -> None:
    right = trained(tmp_path).model
    wrong = trained(tmp_path, factory={"loss_average": "batch"}).model
    assert differs(parameters(wrong), parameters(right))


def test_bf16_equals_autocast_in_the_plain_loop(tmp_path: Path) -> None:
    # Accelerate casts the outputs to single precision, but the loss comes from before that.
    torch.set_default_dtype(torch.float32)
    trainer = trained(tmp_path, bf16=True)
    expected = parameters(plain_loop(autocast=True))
    torch.testing.assert_close(parameters(trainer.model), expected, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    trainer = trained(tmp_path, gradient_checkpointing=True)
    assert_equal(parameters(trainer.model), parameters(plain_loop()))


def test_evaluation_between_steps_is_not_observed(tmp_path: Path) -> None:
    trainer = trained(tmp_path, eval_strategy="steps", eval_steps=1)
    assert_equal(parameters(trainer.model), parameters(plain_loop()))


def test_label_smoothing_and_a_loss_of_ones_own_count_the_same_terms(tmp_path: Path) -> None:
    smooth = trained(tmp_path, label_smoothing_factor=0.1, factory={"decay": 0.0})
    plain = trained(tmp_path, factory={"decay": 0.0})
    assert counts(inner(smooth), "G") == counts(inner(plain), "G")


def test_a_classifier_has_one_term_for_each_sample(tmp_path: Path) -> None:
    rows = sentences(STEPS * SAMPLES)
    for row in rows:
        row["labels"] = row["input_ids"].sum() % 3

    def classifier(pieces: int) -> Trainer:
        torch.manual_seed(0)
        model = LlamaForSequenceClassification(tiny_config(num_labels=3, pad_token_id=0))
        return trained(
            tmp_path,
            model.double(),
            factory={"decay": 0.0},
            rows=rows,
            # This model ignores the number of labels in the step and returns a batch's own mean.
            loss_is_scaled=False,
            per_device_train_batch_size=SAMPLES // pieces,
            gradient_accumulation_steps=pieces,
        )

    whole, pieces = classifier(1), classifier(2)
    assert set(counts(inner(whole), "G").values()) == {SAMPLES}
    assert counts(inner(pieces), "G") == counts(inner(whole), "G")
    assert_equal(parameters(pieces.model), parameters(whole.model))


# --- saving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [SGD, AdamW])
def test_a_resumed_training_equals_an_uninterrupted_one(base: Any, tmp_path: Path) -> None:
    options = {"refresh_every": 4, "factor_every": 2, "momentum": 0.5}
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = trained(tmp_path / "whole", base=base, factory=options, **saving)
    resumed = trained(
        tmp_path / "second",
        base=base,
        factory=options,
        resume=str(tmp_path / "whole" / "checkpoint-3"),
    )
    assert inner(resumed).stats()["steps"] == STEPS
    assert_same(parameters(resumed.model), parameters(whole.model))
    assert_same(inner(resumed).state_dict(), inner(whole).state_dict())


# --- groups ----------------------------------------------------------------------------------


def decays(optimizer: Optimizer, model: nn.Module) -> dict[str, float]:
    by_parameter = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    return {name: by_parameter[p] for name, p in model.named_parameters()}


def test_weight_decay_may_be_given_to_trainer_or_to_the_factory(tmp_path: Path) -> None:
    ours = trained(tmp_path, factory={"weight_decay": 0.1})
    theirs = trained(tmp_path, weight_decay=0.1)
    found = decays(ours.optimizer, ours.model)
    assert found == decays(theirs.optimizer, theirs.model)
    assert {name for name, decay in found.items() if decay == 0} == {
        name for name, _ in ours.model.named_parameters() if "norm" in name
    }
    assert_same(parameters(ours.model), parameters(theirs.model))


@pytest.mark.parametrize("make", [llama, opt, lambda: BertModel(bert_config())])
def test_the_rule_for_weight_decay_is_trainers_own(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    cls, options = optimizer_cls_and_kwargs(model, lr=0.1, weight_decay=0.1)
    found = decays(cls(model.parameters(), **options), model)
    names = set(Trainer.get_decay_parameter_names(None, model))
    assert {name for name, decay in found.items() if decay} == names & set(found)


def test_a_copy_goes_on_as_the_original_does() -> None:
    model = llama()
    cls, options = optimizer_cls_and_kwargs(model, SGD, lr=0.1, **OPTIONS)
    optimizer = cls(model.parameters(), **options)
    both = copy.deepcopy((model, optimizer))
    for one, steps in ((model, optimizer), both):
        one(**stacked(sentences(4))).loss.backward()
        steps.step()
    assert_same(parameters(both[0]), parameters(model))


def test_two_different_weight_decays_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give it in one place"):
        trained(tmp_path, factory={"weight_decay": 0.1}, weight_decay=0.2)


def test_another_model_than_trainers_is_refused(tmp_path: Path) -> None:
    model, other = llama(), llama()
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), report_to=[], use_cpu=True),
        train_dataset=sentences(2),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(other, lr=0.1),
    )
    with pytest.raises(ValueError, match="the same model as Trainer"):
        trainer.train()


def test_the_pair_works_without_trainer() -> None:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(3))
    cls, options = optimizer_cls_and_kwargs(
        model, SGD, lr=0.1, weight_decay=0.1, loss_average="batch", base_options={"momentum": 0.9}
    )
    optimizer = cls(model.parameters(), **options)
    assert isinstance(optimizer, kronfac.KFAC)
    assert optimizer.defaults["momentum"] == 0.9
    found = decays(optimizer, model)
    assert {name for name, decay in found.items() if decay == 0.1} == {
        "0.0.weight",
        "0.2.weight",
        "0.4.weight",
    }
    x = torch.randn(8, 4)
    F.mse_loss(model(x), torch.zeros(8, 3)).backward()
    optimizer.step()
    assert optimizer.stats()["steps"] == 1


def test_plain_parameters_have_no_weight_decay_unless_it_is_given() -> None:
    model = mlp()
    cls, options = optimizer_cls_and_kwargs(model, lr=0.1)
    assert {group["weight_decay"] for group in cls(model.parameters(), **options).param_groups} == {
        0.0
    }
