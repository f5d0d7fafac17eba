"""Where the time of a step goes, by phase."""

from __future__ import annotations

from kronfac.report.read.read import Run, number
from kronfac.report.read.summary import Group, median

# The order of a step; unknown phases come after them, and "other" is last.
PHASES = {
    "data": "waiting for data",
    "forward_backward": "forward + backward",
    "observe": "observe",
    "reduce": "reduce",
    "refresh": "refresh",
    "share": "share",
    "precondition": "precondition",
    "spread": "spread",
    "rescale": "rescale",
    "optimizer": "base optimizer",
    "other": "other",
}
MEANING = {
    "data": "the next batch was not ready yet",
    "forward_backward": "the model itself",
    "observe": "statistics of inputs and output gradients",
    "reduce": "statistics travel to whoever needs them",
    "refresh": "the owner solves",
    "share": "solutions travel to the layer's workers",
    "precondition": "gradients are multiplied by the solutions",
    "spread": "preconditioned gradients travel to the other ranks",
    "rescale": "length of the step",
    "optimizer": "the base optimizer's own step",
    "other": "what no phase claims",
}


def label(phase: str) -> str:
    """What a phase is called on the page."""
    return PHASES.get(phase, phase.replace("_", " "))


def split(group: Group) -> dict[str, float]:
    """Seconds of a mean step by phase, the median over the runs; empty if nothing was timed."""
    found = [shares for run in group.runs if (shares := _split(run))]
    names = {name for shares in found for name in shares}
    known = list(PHASES)
    ordered = sorted(names, key=lambda n: (known.index(n) if n in known else len(known) - 1.5, n))
    return {name: median([shares.get(name, 0.0) for shares in found]) for name in ordered}


def _split(run: Run) -> dict[str, float]:
    totals: dict[str, float] = {}
    before, num_steps, clock, whole = 0, 0, 0.0, 0.0
    for record in run.steps:
        phases, now = record.get("phases"), record["seconds"] or clock
        if isinstance(phases, dict):
            for name, value in phases.items():
                totals[str(name)] = totals.get(str(name), 0.0) + max(0.0, number(value) or 0.0)
            num_steps += max(1, record["step"] - before)
            whole += now - clock
        before, clock = record["step"], now
    if not num_steps or not any(totals.values()):
        return {}
    rest = whole - sum(totals.values())
    if rest > 0.005 * sum(totals.values()):
        totals["other"] = totals.get("other", 0.0) + rest
    return {name: seconds / num_steps for name, seconds in totals.items() if seconds > 0}
