"""The witnesses of files: where a job went on, from the checkpoints that it loaded."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from torchaos.harness.record.history import evidence as names
from torchaos.harness.record.history.checkpoints import (
    Load,
    Save,
    checkpoint_of,
    number_in_contents,
    number_in_name,
    saved_as,
    whole_loads,
)
from torchaos.harness.record.history.evidence import Witness
from torchaos.harness.record.history.scene import OTHER_RANKS, Said, Scene, open_to

Tell = Callable[[Load, Sequence[Save]], Said | None]
_LATE = 1000  # the most steps by which a thread may write late
_UNKNOWN_FILE = 0.2  # the trust in a file that this run was not seen to save


def of_files(scene: Scene) -> list[Witness]:
    """The witnesses of the checkpoints that were loaded. If they are all of another run: the witness of these files."""
    whole = whole_loads(scene.loads)
    ours = [load for load in whole if load.path not in scene.foreign]
    return _of_own(ours, scene) if ours else _of_foreign(whole, scene)


def _of_own(loads: Sequence[Load], scene: Scene) -> list[Witness]:
    """A rank that loaded several checkpoints may have gone on from any."""
    folders = {posixpath.dirname(checkpoint_of(save.path)) for save in scene.saves}
    ours = [
        load for load in loads
        if posixpath.dirname(checkpoint_of(load.path)) in folders or saved_as(load.path, scene.saves, load.mono_s)
    ]  # fmt: skip
    trust = 1.0 if any(saved_as(load.path, scene.saves, load.mono_s) for load in ours) else _UNKNOWN_FILE
    return [
        replace(witness, trust=witness.trust * trust)
        for name, tell in ((names.RECORD, _save_record), (names.CONTENTS, _contents), (names.NAME, _name))
        for witness in _of_loads(name, ours or loads, scene.saves, tell)
    ]


def _of_loads(name: str, loads: Sequence[Load], saves: Sequence[Save], tell: Tell) -> list[Witness]:
    """A checkpoint that was loaded and says nothing silences the others: the job may have gone on from that one."""
    said: dict[int, dict[str, list[Said]]] = defaultdict(lambda: defaultdict(list))  # by rank and checkpoint
    for load in reversed(loads):
        if load.ok:
            known = tell(load, saves)
            of = load.path if name == names.RECORD else _set_of_files(load.path)
            said[load.rank][of] += [known] if known else []
    by_rank = {
        rank: [each for known in of_checkpoint.values() for each in known]
        for rank, of_checkpoint in said.items() if all(of_checkpoint.values())
    }  # fmt: skip
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for rank in sorted(by_rank):
        groups[tuple(dict.fromkeys(fits for fits, _rests_on in by_rank[rank]))].append(rank)
    found = list[Witness]()
    for fits, ranks in sorted(groups.items(), key=lambda item: (-len(item[1]), item[1])):
        trust, rests_on = OTHER_RANKS if found else 1.0, by_rank[ranks[0]][0][1]
        found.append(
            open_to(name, tuple(dict.fromkeys(step for of_one in fits for step in of_one)), rests_on, ranks, trust)
        )
    return found


def _set_of_files(path: str) -> str:
    """The checkpoint to which a file belongs: by the step in its path, or else its folder."""
    own = checkpoint_of(path)
    return own if number_in_name(own) is not None else posixpath.dirname(own)


def _of_foreign(loads: Sequence[Load], scene: Scene) -> list[Witness]:
    """The witness of files that the first attempt loaded too, before anything of this run was saved."""
    bases = sorted({scene.foreign[load.path] for load in loads if load.path in scene.foreign})
    return [open_to(names.FOREIGN, bases, "the first attempt loaded this file too, and began there")] if bases else []


def _save_record(load: Load, saves: Sequence[Save]) -> Said | None:
    save = saved_as(load.path, saves, load.mono_s)
    if save is None or save.global_step is None:
        return None
    rests_on = f"{save.path} was saved after step {save.global_step}, in attempt {save.attempt}"
    before = range(save.global_step - 1, max(0, save.global_step - _LATE), -1) if save.in_thread else ()
    return (save.global_step, *before), rests_on


def _contents(load: Load, saves: Sequence[Save]) -> Said | None:
    found = number_in_contents(load.numbers)
    if found is None or found[1] < 0:
        return None
    key, number = found
    # Some jobs count steps from 0, and those that warm up count otherwise than we do.
    fits = sorted({number - ahead + from_zero for ahead in (0, _ahead(saves) or 0) for from_zero in (0, 1)})
    return tuple(fits), f"{load.path} holds {key} = {number}"


def _name(load: Load, saves: Sequence[Save]) -> Said | None:
    number, ahead = number_in_name(load.path), _ahead(saves)
    if number is None or (ahead is None and any(_named(saves))):
        return None  # it counts something else: saves, epochs
    base = number - (ahead or 0)
    late = any(save.in_thread for save in saves)  # then it may also be the number of an earlier step
    fits = (base, base + 1) if ahead is None else tuple(range(min(number, base), base + 1)) if late else (base,)
    return fits, f"it is called {load.path}"


def _ahead(saves: Sequence[Save]) -> int | None:
    """By how much the numbers in the names of saves are ahead of their steps. None if these numbers are no steps."""
    named = _named(saves)
    ahead = {number - done for number, done in named}
    plain = len(named) > 1 or ahead <= {-1, 0, 1}
    return ahead.pop() if len(ahead) == 1 and plain else None


def _named(saves: Sequence[Save]) -> set[tuple[int, int]]:
    named = ((number_in_name(save.path), save.global_step) for save in saves)
    return {(number, done) for number, done in named if number is not None and done is not None}
