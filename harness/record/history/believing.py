"""The rules by which witnesses of an attempt's base are believed. The base is the number of global steps before the
attempt's first step. The first witness that knows decides. If it leaves several possibilities, the next witnesses
narrow them down. A witness that disagrees is kept as evidence that some state was not restored.

Two kinds of witness are not believed alone. The record of a save says when the file was written: if the loaded file
contains another step, the job's behaviour agrees with the file, and nothing agrees with the record, then the file is
believed. And a file that the first attempt loads may be of another run, as in fine-tuning: it counts only if a counter
of the job agrees with it; otherwise the run begins at step 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RECORD, CONTENTS = "the loaded checkpoint", "the contents of the loaded checkpoint"
NAME, START = "the name of the loaded checkpoint", "the start"
OPTIMIZER, SCHEDULER = "the optimizer's own step counter", "the LR scheduler's counter"
SAMPLES, LOSSES, LOG = "the samples", "the losses", "the job's log"
IN_PART, FOREIGN = "the checkpoint of which a part was loaded", "the file of another run"
_FILE = (CONTENTS, NAME)
_RUNNING = (OPTIMIZER, SCHEDULER, SAMPLES, LOSSES)


@dataclass(frozen=True)
class Witness:
    """The statement of one witness about the steps before an attempt's first step."""

    name: str
    value: int | None  # None: several values fit equally well
    rests_on: str  # the observation, for messages
    also: tuple[int, ...] = ()  # other values that fit as well
    ranks: tuple[int, ...] = ()

    @property
    def fits(self) -> tuple[int, ...]:
        return self.also if self.value is None else (self.value, *self.also)


def decide(witnesses: Sequence[Witness]) -> tuple[int | None, tuple[str, ...]]:
    """The base, and a sentence for each witness that disagrees with it. The base is None if it is not known; it is
    never guessed."""
    if not witnesses:
        return None, ()
    first, *others = _less_a_lone_record(witnesses)
    fits, preferred = set(first.fits), first.value
    for other in others:
        common = fits & set(other.fits)
        if common and len(fits) > 1:
            preferred = other.value if other.value in common and preferred not in common else preferred
            fits = common
    base = preferred if preferred in fits else next(iter(fits)) if len(fits) == 1 else None
    if base is None:
        return None, ()
    return base, tuple(_disagrees(witness, base) for witness in witnesses if base not in witness.fits)


def of_this_run(file: Sequence[Witness], others: Sequence[Witness]) -> bool:
    """Whether a loaded file is of this run. `file`: the steps that the file's name and contents show. `others`: the
    steps that the job's own counters show. They agree if the file is of this run."""
    return any(_agree(witness, other) for witness in file for other in others)


def goes_on_from(base: int | None, witnesses: Sequence[Witness], straight_on: int | None) -> bool:
    """Whether training continued from `base`, the step of a checkpoint that was loaded between two steps. If the
    checkpoint was loaded for an evaluation, training continued from `straight_on` instead. If nothing else shows which
    is true, the record of the save decides."""
    if base is None or base == straight_on:
        return False
    running = [witness for witness in witnesses if witness.name in _RUNNING]
    if not running:
        return any(witness.name == RECORD and base in witness.fits for witness in witnesses)
    return any(base in witness.fits and straight_on not in witness.fits for witness in running)


def is_done_again_from(base: int | None, witnesses: Sequence[Witness], straight_on: int | None) -> bool:
    """Whether the job executes the steps after `base` again, although it loaded no checkpoint. The samples decide,
    because the counters of a new optimizer also start again. A job that goes back to its start has only warmed up; in
    the first attempt such steps count, as they do for triggers."""
    trained = [witness for witness in witnesses if witness.name in (SAMPLES, LOSSES)]
    return base not in (None, 0, straight_on) and bool(trained) and all(
        base in witness.fits and straight_on not in witness.fits for witness in trained
    )  # fmt: skip


def _less_a_lone_record(witnesses: Sequence[Witness]) -> Sequence[Witness]:
    record = next((witness for witness in witnesses if witness.name == RECORD), None)
    others = [witness for witness in witnesses if witness.name != RECORD]
    file = [witness for witness in others if witness.name in _FILE]
    running = [witness for witness in others if witness.name in _RUNNING]
    if record is None or any(_agree(record, witness) for witness in file):
        return witnesses
    in_file = {base for witness in file for base in witness.fits}
    against = [witness for witness in running if in_file & set(witness.fits)]
    return (
        others
        if against and all(in_file & set(witness.fits) or not _agree(record, witness) for witness in running)
        else witnesses
    )


def _agree(witness: Witness, other: Witness) -> bool:
    return bool(set(witness.fits) & set(other.fits))


def _disagrees(witness: Witness, base: int) -> str:
    said = " or ".join(str(fit) for fit in witness.fits[:3])
    where = f" on rank {in_words(witness.ranks)}" if witness.ranks else ""
    return f"{witness.name}{where} says {said} steps were done, not {base}: {witness.rests_on}"


def in_words(ranks: Iterable[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
