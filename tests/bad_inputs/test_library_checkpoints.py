"""A damaged or foreign checkpoint is refused in one sentence, before anything is changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kronfac
from tests.training import assert_same, kfac, mlp, parameters, snapshot, train

NAN, INF = float("nan"), float("inf")
State = dict[str, Any]
Damage = Callable[[State], Any]


def trained(**options: Any) -> kronfac.KFAC:
    model = mlp()
    optimizer = kfac(model, **options)
    train(model, optimizer, range(2))
    return optimizer


def put(key: str, value: Any, index: int = 0) -> Damage:
    """Replace one saved value."""

    def damage(saved: State) -> State:
        assert key in saved["state"][index]
        saved["state"][index][key] = value
        return saved

    return damage


def put_everywhere(key: str, value: Any) -> Damage:
    def damage(saved: State) -> State:
        for entry in saved["state"].values():
            entry[key] = value
        return saved

    return damage


def poison(key: str, value: float) -> Damage:
    """Overwrite one number of a saved tensor."""

    def damage(saved: State) -> State:
        tensor = saved["state"][0][key].clone()
        tensor.view(-1)[0] = value
        saved["state"][0][key] = tensor
        return saved

    return damage


def without(key: str) -> Damage:
    def damage(saved: State) -> State:
        del saved["state"][0][key]
        return saved

    return damage


def without_state(saved: State) -> State:
    return {**saved, "state": {}}


def regroup(**changes: Any) -> Damage:
    def damage(saved: State) -> State:
        saved["param_groups"][0].update(changes)
        return saved

    return damage


def instead(value: Any) -> Damage:
    return lambda saved: value


ROWS: list[tuple[str, Damage, type[Exception], str]] = [
    ("nothing", instead(None), TypeError, "load_state_dict got None"),
    ("a number", instead(3), TypeError, "load_state_dict got 3"),
    ("a string", instead("run.pt"), TypeError, "load_state_dict got 'run.pt'"),
    ("a list", instead([{}]), TypeError, "give what state_dict"),
    ("a tensor", instead(torch.zeros(99)), TypeError, "got a Tensor"),
    ("empty", instead({}), ValueError, "with the keys none"),
    ("another dict", instead({"model": {}}), ValueError, "with the keys 'model'"),
    ("no groups", instead({"state": {}}), ValueError, "a list under 'param_groups'"),
    ("no state", instead({"param_groups": []}), ValueError, "a dict under 'state'"),
    ("groups no list", instead({"state": {}, "param_groups": 1}), ValueError, "a list under"),
    ("group no dict", instead({"state": {}, "param_groups": [1]}), ValueError, "group 0"),
    ("group without params", instead({"state": {}, "param_groups": [{}]}), ValueError, "'params'"),
    ("no group", instead({"state": {}, "param_groups": []}), ValueError, "0 parameter groups"),
    ("empty state", without_state, ValueError, "holds nothing of K-FAC"),
    ("entry no dict", lambda s: {**s, "state": {0: 5}}, ValueError, "parameter 0 is 5"),
    ("names too short", regroup(**{"kronfac.names": ["0.weight"]}), ValueError, "kronfac.names"),
    ("names no list", regroup(**{"kronfac.names": None}), ValueError, "kronfac.names"),
    ("shapes too short", regroup(**{"kronfac.shapes": []}), ValueError, "kronfac.shapes"),
    ("textual step", put("kronfac.step", "two"), ValueError, "step of '0.weight' is 'two'"),
    ("no step", put("kronfac.step", None), ValueError, "step of '0.weight' is None"),
    ("boolean step", put("kronfac.step", True), ValueError, "is True"),
    ("several steps", put("kronfac.step", torch.ones(2)), ValueError, "not a whole number"),
    ("half a step", put("kronfac.step", torch.tensor(0.5)), ValueError, "not a whole number"),
    ("step NaN", put("kronfac.step", torch.tensor(NAN)), ValueError, "not a whole number"),
    ("negative", put_everywhere("kronfac.step", torch.tensor(-1)), ValueError, "from 0 to"),
    ("huge", put_everywhere("kronfac.step", torch.tensor(2**60)), ValueError, "from 0 to"),
    ("another step", put("kronfac.step", torch.tensor(9)), ValueError, "at step 9 by '0.weight'"),
    ("late factor", put("kronfac.last_factor", torch.tensor(7)), ValueError, "later than step 2"),
    ("late refresh", poison("kronfac.schedule", 99), ValueError, "later than step 2"),
    ("no schedule", without("kronfac.schedule"), ValueError, "layer '0': .* no schedule"),
    ("short schedule", put("kronfac.schedule", torch.zeros(2).long()), ValueError, "6 whole"),
    ("schedule text", put("kronfac.schedule", "soon"), ValueError, "'soon', not a tensor"),
    ("NaN in A", poison("kronfac.A.sum", NAN), ValueError, "A.sum of '0.weight' .* not finite"),
    ("inf in G", poison("kronfac.G.sum", INF), ValueError, "G.sum of '0.weight' .* not finite"),
    ("NaN count", poison("kronfac.A.count", NAN), ValueError, "A.count"),
    ("negative count", poison("kronfac.G.count", -1.0), ValueError, "non-negative and finite"),
    ("A a number", put("kronfac.A.sum", 1.0), ValueError, "A.sum of '0.weight' is 1.0"),
    ("A of another shape", put("kronfac.A.sum", torch.eye(2)), ValueError, "A.sum is"),
    ("NaN momentum", poison("kronfac.momentum", NAN), ValueError, "momentum .* not finite"),
    ("text momentum", put("kronfac.momentum", "0.9"), ValueError, "'0.9', not a tensor"),
]


@pytest.fixture(scope="module")
def optimizer() -> kronfac.KFAC:
    """One for all rows: none of them may change it."""
    return trained(momentum=0.5)


@pytest.mark.parametrize(
    ("damage", "kind", "phrase"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    optimizer: kronfac.KFAC, damage: Damage, kind: type[Exception], phrase: str
) -> None:
    saved = damage(snapshot(optimizer))
    before, weights = snapshot(optimizer), parameters(optimizer.model)
    with pytest.raises(kind, match=phrase):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)
    assert_same(parameters(optimizer.model), weights)


def test_every_number_of_a_solution_is_looked_at() -> None:
    optimizer = trained()
    saved = snapshot(optimizer)
    keys = [key for key in saved["state"][0] if key.startswith("kronfac.solution.")]
    assert keys
    for key in keys:
        damaged = poison(key, NAN)(copy.deepcopy(saved))
        with pytest.raises(ValueError, match=r"solution.* not finite"):
            optimizer.load_state_dict(damaged)


def test_a_damping_that_is_not_positive_is_refused() -> None:
    rule = kronfac.LevenbergMarquardt(every=1)
    saved = snapshot(kfac(mlp(), damping=rule))
    saved["state"][0]["kronfac.damping"] = torch.tensor(-1.0)
    with pytest.raises(ValueError, match=r"damping of .* positive and finite"):
        kfac(mlp(), damping=rule).load_state_dict(saved)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_state_of_any_moment_is_loaded(steps: int) -> None:
    model = mlp()
    optimizer = kfac(model, refresh_every=kronfac.StaleInterval(), stagger=False)
    train(model, optimizer, range(steps))
    saved = snapshot(optimizer)
    successor = kfac(mlp(), refresh_every=kronfac.StaleInterval())
    successor.load_state_dict(saved)
    assert_same(snapshot(successor)["state"], saved["state"])
