"""What the parts of a block must keep to, so that all ranks can solve them."""

from __future__ import annotations

from kronfac.protocol.block import Block


def check_block(block: Block) -> None:
    """Raise, for the author of a method, if the parts of a block cannot be solved as they say."""
    if not block.shared_parts:
        raise ValueError(
            f"{block.label!r}: at least one part needs every='refresh' or 'factor', which says when a "
            "layer is first solved."
        )
    for name, part in block.parts.items():
        sources = [block.statistics[one] for one in part.statistics]
        if not sources and not part.after:
            raise ValueError(f"{block.label!r}: part {name!r} is solved from no statistic.")
        if part.every == "step" and not all(one.is_replicated for one in sources):
            raise ValueError(
                f"{block.label!r}: part {name!r} has every='step', so its statistics must come from "
                "gradients or weights, which are the same on all ranks."
            )
        by_each = part.after or part.by_each or part.every == "step"
        if by_each and not block.seen_through.isdisjoint(part.solution):
            raise ValueError(
                f"{block.label!r}: rows are observed in a basis that part {name!r} makes, which must "
                "not have after=..., by_each=True or every='step'."
            )
