"""Clauses for reasons about checkpoints that differ from the twin's, or that are equal except for some entries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, Clash
from torchaos.harness.analysis.checkpointing.checkpoint_diff import Compared
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import Difference
from torchaos.harness.analysis.tolerance import but_for_rounding
from torchaos.harness.record.record import Record


def but(made: Compared, run: Record) -> str:
    """Phrases about the differences that were allowed, for the reason of an assertion that passes."""
    phrases = []
    if made.rounded:
        phrases.append(but_for_rounding(made.rounded, run.history))
    if made.within:
        phrases.append(f"within the tolerance, at most {made.within:.1g} apart")
    if made.learned:
        far = max(made.learned.values())
        phrases.append(f"except {listed(made.learned)}, at most {far:.1g} apart, as far as the twins are")
    if made.unsized:
        without = "the twins differ from each other, or from this run before any fault"
        phrases.append(f"except {len(made.unsized)} entries in which {without} ({listed(made.unsized)})")
    if made.restarts:
        phrases.append(f"except {listed(made.restarts)}, which show the restart")
    if made.ignored:
        phrases.append(f"except {listed(made.ignored)}, which the scenario ignores")
    return "".join(f", {phrase}" for phrase in phrases)


def left_out(other_world: int, alone: Sequence[Checkpoint]) -> str:
    """Clauses about checkpoints that were not compared. `other_world`: how many were saved on another number of ranks;
    `alone`: the checkpoints that the twin lacks."""
    world = f"those of {other_world} more were not compared: they were saved on another number of ranks"
    extra = f"{listed([own.at for own in alone])} {'is' if len(alone) == 1 else 'are'} not in the twin"
    return (f"; {world}" if other_world else "") + (f"; {extra}" if alone else "")


def words(first: Clash) -> str:
    if first.kind == "checkpoint" and first.ours is None:
        return f"{first.path} ({first.theirs}) is missing, and the twin has it"
    if first.kind == "checkpoint":
        return f"{first.path} is of {first.ours}, and the twin's of {first.theirs}"
    where = f"{first.path} (step {first.step})" if first.step is not None else first.path
    if first.ours is None:
        return f"the {first.kind} {first.name} is missing in {where}, and is there in the twin's"
    if first.theirs is None:
        return f"the {first.kind} {first.name} in {where} is not in the twin's"
    instead = f": {first.ours} instead of {first.theirs}" if first.kind == "value" else ""
    size = f" by {first.distance:.1g} of its norm" if first.kind == "tensor" and first.distance else ""
    return f"the {first.kind} {first.name} in {where} differs from the twin's{instead}{size}"


def also(first: Clash, more: int) -> str:
    """A clause with the number of further clashes, to follow the clause about the first clash."""
    if not more:
        return ""
    one, many = ("checkpoint", "checkpoints") if first.kind == "checkpoint" else ("entry", "entries")
    others = f"1 other {one}" if more == 1 else f"{more} other {many}"
    if first.kind != "checkpoint" and first.ours is not None and first.theirs is not None:
        return f", and so {'does' if more == 1 else 'do'} {others}"
    return f", and {others} {'is' if more == 1 else 'are'} not as in the twin either"  # or missing, or of another step


def meaning(loss: Difference | None, bitwise: bool, first: Clash, *, seen: bool, clear: bool = True) -> str:
    """A sentence about the meaning of the first clash. `loss`: the first difference of the losses that neither noise
    nor rounding explains; None: there is none. `bitwise`: the losses agree bit by bit, as far as both runs show
    them. `seen`: both runs show losses. `clear`: it is known whether they agree."""
    agree = said("losses agree" if bitwise else "losses near")
    name = first.name.rpartition(":")[2]
    hint = f" If it may differ: checkpoint_integrity: {{ignore: [{name}]}}." if first.kind == "value" else ""
    if loss is None and not seen:
        return f"No losses were recorded that would show whether the training differs, too.{hint}"
    if not clear:
        return f"Whether the losses agree is not clear.{hint}"
    if loss is None and first.kind == "checkpoint":
        return said("decides saves", agree=agree)
    if loss is None:
        return said("no loss shows", agree=agree, hint=hint)
    if first.step is not None and loss.step > first.step:
        return f"The losses differ only later, from step {loss.step} on."
    return f"The {loss.what} differs from step {loss.step} on, so the job had left the twin's path before."


def listed(names: Iterable[str]) -> str:
    """The first three names in order, and an ellipsis if there are more."""
    found = sorted(names)
    return ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
