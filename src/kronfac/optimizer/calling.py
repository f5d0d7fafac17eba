"""What to write instead of a call that Python would refuse with a bare TypeError."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from kronfac.optimizer.common import all_defaults
from kronfac.protocol.method import Defaults

P = ParamSpec("P")

_EXAMPLE = "torch.optim.SGD(model.parameters(), lr=0.1)"
#: Options that everybody knows from other optimizers, which here are the base optimizer's.
_OF_THE_BASE = ("lr", "betas", "eps", "weight_decay", "dampening", "foreach", "fused", "params")


def explained(common: type, defaults: Defaults) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let an optimizer's ``__init__`` say what to write where its arguments cannot be meant.

    Its signature, as help shows it, lists the common keywords with the method's defaults.
    """

    def decorate(initialise: Callable[P, None]) -> Callable[P, None]:
        signature = with_common(inspect.signature(initialise), common, defaults)

        @wraps(initialise)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                name = type(args[0]).__name__
                sentence = _sentence(name, signature, args[1:], kwargs)
                raise TypeError(sentence or str(error)) from None
            initialise(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorate


def with_common(own: inspect.Signature, common: type, defaults: Defaults) -> inspect.Signature:
    """A signature that ends in ``**common``, with the common keywords in its place."""
    kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=value,
            annotation=common.__annotations__[name],
        )
        for name, value in all_defaults(defaults).items()
    ]
    named = inspect.Parameter.KEYWORD_ONLY
    first = [one for one in kept if one.kind is not named]
    return own.replace(parameters=[*first, *shared, *(one for one in kept if one.kind is named)])


def _sentence(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    known = list(signature.parameters)[1:]
    unknown = [option for option in kwargs if option not in known]
    borrowed = [option for option in unknown if option in _OF_THE_BASE]
    if borrowed or (len(args) < 2 and "base_optimizer" not in kwargs):
        what = f"{', '.join(borrowed)} belongs to the" if borrowed else "it needs a"
        return (
            f"{name} preconditions gradients and leaves the step to another optimizer; {what} base "
            f"optimizer: write {name}(model, {_EXAMPLE})."
        )
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = (
            f"did you mean {close[0]!r}?" if close else f"its options are {', '.join(known[2:])}."
        )
        return f"{name} has no option {unknown[0]!r}; {hint}"
    if len(args) > 2:
        return (
            f"{name} takes the model and the base optimizer as positional arguments, not {args[2]!r}; "
            f"name every option, for example damping={args[2]!r}."
        )
    return None
