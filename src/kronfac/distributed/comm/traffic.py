"""What travels, in bytes and messages: counted where it is sent, by phase."""

from __future__ import annotations

from typing import Any, Literal

#: The phases in which tensors travel.
TRAVELLING = ("reduce", "share", "spread", "rescale")
Phase = Literal["reduce", "share", "spread", "rescale", "control"]
Kind = Literal["all_reduce", "reduce", "broadcast", "gather", "exchange"]


def ring_bytes(kind: Kind, size: int, ranks: int) -> float:
    """Bytes that one rank sends: ``2(P-1)/P·m`` for an all-reduce, else ``m`` (0 for a lone rank)."""
    if ranks == 1:
        return 0.0
    return size * 2 * (ranks - 1) / ranks if kind == "all_reduce" else float(size)


class Traffic:
    """Counts the collectives that this rank takes part in.

    ``bytes`` is what they carry, ``sent`` what a rank sends for it by the formulas of ring algorithms.
    Messages by which ranks agree (flags and counts) are kept apart, as ``control``.
    """

    def __init__(self) -> None:
        self.bytes = dict.fromkeys((*TRAVELLING, "control"), 0)
        self.messages = dict.fromkeys((*TRAVELLING, "control"), 0)
        self.sent = dict.fromkeys((*TRAVELLING, "control"), 0.0)

    def record(self, phase: Phase, kind: Kind, size: int, ranks: int) -> None:
        """Count one message of ``size`` bytes among some ranks."""
        self.bytes[phase] += size
        self.messages[phase] += 1
        self.sent[phase] += ring_bytes(kind, size, ranks)

    def stats(self) -> dict[str, Any]:
        """What was counted, as plain numbers."""
        return {
            "bytes": {phase: self.bytes[phase] for phase in TRAVELLING},
            "messages": {phase: self.messages[phase] for phase in TRAVELLING},
            "sent": {phase: round(self.sent[phase]) for phase in TRAVELLING},
            "control": {"bytes": self.bytes["control"], "messages": self.messages["control"]},
        }
