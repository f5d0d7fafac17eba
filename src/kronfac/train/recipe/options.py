"""Which options each kind of optimizer takes in a recipe."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from kronfac.protocol.registry import optimizers
from kronfac.runs.errors import UserError
from kronfac.runs.hints import advice

_SGD = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
_ADAMW = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_OTHER = ("other_lr", "other_betas", "other_eps", "other_weight_decay")


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _is_positive_or_0(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_share, value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 1


_NOT_NEGATIVE = ("lr", "other_lr", "weight_decay", "other_weight_decay", "eps", "other_eps")
_MOMENTA = ("momentum", "base_momentum", "other_momentum")
_COUNTS = ("precondition_frequency", "max_precondition_dim")
_SWITCHES = (
    *("nesterov", "base_nesterov", "amsgrad"),
    *("merge_dims", "normalize_gradient", "correct_bias"),
)
#: Options that torch looks at too late or not at all: a check, and the words for what is allowed.
_WANTED: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (_NOT_NEGATIVE, "a number of at least 0", _is_positive_or_0),
    (_MOMENTA, "a number in [0, 1)", _is_share),
    (("dampening",), "a number in [0, 1]", lambda value: _is_number(value) and 0 <= value <= 1),
    # SOAP takes a negative one for its second beta.
    (("shampoo_beta",), "a number below 1", lambda value: _is_number(value) and value < 1),
    (_COUNTS, "a whole number from 1", _is_count),
    (("ns_steps",), "a whole number from 1 to 99", lambda value: _is_count(value) and value < 100),
    (("betas", "other_betas"), "two numbers in [0, 1), [0.9, 0.99] for example", _are_betas),
    (_SWITCHES, "true or false", lambda value: isinstance(value, bool)),
    (("adjust_lr_fn",), "a text", lambda value: isinstance(value, str)),
)
#: What steps the parameters that K-FAC leaves out: its base optimizer, or AdamW.
_OTHERS = ("same", "adamw")
#: What a program sets itself, and what cannot be written in a recipe.
_NOT_HERE = ("self", "model", "base_optimizer", "grad_scaler", "process_group")


def methods() -> dict[str, type]:
    """Optimizers of all registered methods, by the kind that recipes call them: ``"kfac"``, ..."""
    return {name.lower(): optimizer for name, optimizer in optimizers().items()}


def method_name(kind: str) -> str | None:
    """The name of a method as its authors write it, if this kind is one."""
    found = methods().get(kind)
    return None if found is None else found.__name__


def starting_line(kind: str) -> dict[str, Any]:
    """Options of a method where a recipe has no table of it."""
    return dict(methods()[kind].method.line)  # type: ignore[attr-defined]


def method_keys(kind: str) -> tuple[str, ...]:
    """Keywords of a method's optimizer that a recipe may set."""
    signature = inspect.signature(methods()[kind])
    return tuple(name for name in signature.parameters if name not in _NOT_HERE)


#: The base optimizers that K-FAC may have, with their options.
BASES: dict[str, tuple[str, ...]] = {
    "sgd": ("base_momentum", "base_nesterov", "weight_decay"),
    "adamw": ("betas", "eps", "weight_decay"),
}

KEYS: dict[str, tuple[str, ...]] = {
    "sgd": _SGD,
    "adamw": _ADAMW,
    "muon": ("lr", "momentum", "nesterov", "weight_decay", "ns_steps", "adjust_lr_fn", *_OTHER),
    "soap": (
        "lr",
        "betas",
        "shampoo_beta",
        "weight_decay",
        "precondition_frequency",
        "max_precondition_dim",
        "merge_dims",
        "normalize_gradient",
        "correct_bias",
        "eps",
    ),
}


def kinds() -> tuple[str, ...]:
    """Kinds of optimizers that a recipe may name."""
    return (*KEYS, *methods())


def keys_of(kind: str) -> tuple[str, ...]:
    """Options that a kind of optimizer takes in a recipe."""
    if kind in KEYS:
        return KEYS[kind]
    bases = dict.fromkeys(key for keys in BASES.values() for key in keys)
    others = ("other", "other_lr", "other_betas", "other_momentum", "other_weight_decay")
    return ("lr", "base", *method_keys(kind), *bases, *others)


def check_options(kind: str, options: Mapping[str, Any], where: str) -> None:
    """Raise unless every option is one of this kind and learning rates are usable."""
    known = keys_of(kind)
    own = method_keys(kind) if kind in methods() else ()
    for key, value in options.items():
        if key not in known:
            raise UserError(f"unknown key {key!r} in [{where}]; {advice(key, known)}")
        if key not in own:  # a method checks its own, which may be schedules
            _check_value(key, value, where)
    if "lr" not in options:
        raise UserError(f"[{where}] has no 'lr'; give one, for example {where}.lr = 0.1")
    base = options.get("base", "sgd")
    if not isinstance(base, str) or base not in BASES:
        raise UserError(f"{where}.base = {base!r} is not supported; {advice(str(base), BASES)}")
    if kind in methods():
        _check_other(options, where)
        if options.get("rescale") == "quadratic":
            raise UserError(
                f"{where}.rescale = 'quadratic' runs each batch several times, which recipes cannot; "
                "choose another one, 'unit' for example."
            )
        for key in options:
            having = [name for name, keys in BASES.items() if key in keys]
            if having and base not in having and key not in own:
                raise UserError(
                    f"{where}.{key} is an option of base {having[0]!r}, not of {base!r}."
                )


def _check_value(key: str, value: Any, where: str) -> None:
    for keys, wanted, is_good in _WANTED:
        if key in keys and not is_good(value):
            raise UserError(f"{where}.{key} = {value!r} must be {wanted}.")


def _check_other(options: Mapping[str, Any], where: str) -> None:
    """Refuse options of the rest that what steps it does not have."""
    other = options.get("other", "same")
    if other not in _OTHERS:
        raise UserError(
            f"{where}.other = {other!r} is not supported; {advice(str(other), _OTHERS)}"
        )
    if "other_betas" in options and other == "same":
        raise UserError(f"{where}.other_betas needs {where}.other = 'adamw'.")
    if "other_momentum" in options and "adamw" in (other, options.get("base")):
        raise UserError(f"{where}.other_momentum is an option of SGD, not of AdamW.")
