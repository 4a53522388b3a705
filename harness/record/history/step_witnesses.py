"""Makes the witnesses of the step from which a job went on: those of the files that it loaded, and all others.
step_evidence.py says what a witness is and what each kind observes, and decides.

A job that comes back may start counting at any number, so its own count alone is not trusted."""

from __future__ import annotations

import math
import posixpath
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from torchaos.harness.record.checkpoint_names import checkpoint_of, number_in_name
from torchaos.harness.record.history import step_evidence as names
from torchaos.harness.record.history.first_steps import WARM, Said, Scene, grouped, of_content, of_peers
from torchaos.harness.record.history.saves_and_loads import Load, Save, number_in_contents, saved_as, whole_loads
from torchaos.harness.record.history.step_evidence import Witness
from torchaos.harness.record.steps import Executions

Tell = Callable[[Load, Scene], Said | None]
_LATE = 1000  # the most steps by which a thread may write late
_UNKNOWN_FILE = 0.2  # the trust in a file whose save this run was not seen to make


def of_files(scene: Scene) -> list[Witness]:
    """The witnesses of the checkpoints that were loaded. If they are all of another run: the witness of these files."""
    whole = whole_loads(scene.loads)
    ours = [load for load in whole if load.path not in scene.foreign]
    if ours or not whole:
        return _of_own(ours, scene)
    return [Witness(names.FOREIGN, (0,), "the first attempt loaded this file too, and began there")]


def _of_own(loads: Sequence[Load], scene: Scene) -> list[Witness]:
    """The witnesses of the checkpoints of this run. A rank that loaded several checkpoints may have gone on from
    any."""
    folders = {posixpath.dirname(checkpoint_of(save.path)) for save in scene.saves}
    above = Counter(map(posixpath.dirname, folders))
    folders |= {folder for folder, checkpoints in above.items() if checkpoints > 1}  # each in a folder of its own
    ours = [
        load for load in loads
        if posixpath.dirname(checkpoint_of(load.path)) in folders or saved_as(load.path, scene.saves, load.mono_s)
    ]  # fmt: skip
    trust = 1.0 if any(saved_as(load.path, scene.saves, load.mono_s) for load in ours) else _UNKNOWN_FILE
    return [
        replace(witness, trust=witness.trust * trust)
        for name, tell in ((names.RECORD, _save_record), (names.CONTENTS, _contents), (names.NAME, _name))
        for witness in _of_loads(name, loads, scene, tell)
    ]


def _of_loads(name: str, loads: Sequence[Load], scene: Scene, tell: Tell) -> list[Witness]:
    """The witnesses of one kind (`name`) about the loaded checkpoints. `tell`: a function that gives the statement
    about one load. If it says nothing about one of a rank's checkpoints, the rank is no witness: the job may have gone
    on from that checkpoint."""
    said: dict[int, dict[str, list[Said]]] = defaultdict(lambda: defaultdict(list))  # by rank and checkpoint
    for load in reversed(loads):
        if load.ok:
            known = tell(load, scene)
            of = load.path if name == names.RECORD else _set_of_files(load.path)
            said[load.rank][of] += [known] if known else []
    by_rank = dict[int, Said]()
    for rank, of_checkpoint in said.items():
        if all(of_checkpoint.values()):
            of_rank = [each for told in of_checkpoint.values() for each in told]
            by_rank[rank] = tuple(dict.fromkeys(step for fits, _rests_on in of_rank for step in fits)), of_rank[0][1]
    return grouped(name, by_rank)


def _set_of_files(path: str) -> str:
    """The checkpoint to which a file belongs: by the step in its path, or else its folder."""
    own = checkpoint_of(path)
    return own if number_in_name(own) is not None else posixpath.dirname(own)


def _save_record(load: Load, scene: Scene) -> Said | None:
    save = saved_as(load.path, scene.saves, load.mono_s)
    if save is None or save.global_step is None:
        return None
    rests_on = f"{save.path} was saved after step {save.global_step}, in attempt {save.attempt}"
    begun = _begun(save) or 0
    before = range(begun, max(0, begun - _LATE), -1) if save.in_thread or begun != save.global_step else ()
    # Ranks that had made different numbers of steps wrote the same file.
    apart = (
        other.global_step for other in scene.saves
        if other.path == save.path and other.begun_s <= (save.ended_s or 0.0) and save.begun_s <= (other.ended_s or 0.0)
    )  # fmt: skip
    # A rank that makes no steps, such as an actor, may be done with its part of the step that the others are making.
    stepless = not any(np.isin(part.rank, save.ranks).any() for part in scene.known)
    next_ = (save.global_step + 1,) if stepless else ()
    fits = (save.global_step, *next_, *before, *(step for step in apart if step is not None))
    return tuple(dict.fromkeys(fits)), rests_on


def _contents(load: Load, scene: Scene) -> Said | None:
    found = number_in_contents(load.numbers)
    if found is None or found[1] < 0:
        return None
    key, number = found
    ahead = _ahead(scene.saves)
    if ahead is None and number == number_in_name(load.path) and any(_named(scene.saves)):
        return None  # it counts what the names count, such as saves or the steps of a phase
    base = number - (ahead or 0)
    # Some jobs count steps from 0, and jobs with a warm-up count in another way than the history.
    if any(save.in_thread for save in scene.saves):
        fits = {*range(min(number, base), max(number, base) + 2 + (scene.unseen and ahead is None) * WARM)}
    else:
        fits = {number, number + 1, base, *range(base + 1, base + 2 + (scene.unseen and ahead is None) * WARM)}
    # A job that makes several steps in each iteration may count both.
    also = {name: int(steps) for name, steps in load.numbers.items() if name == "steps" and steps >= 0}
    told = {key: number, **also}
    holds = " and ".join(f"{name} = {value}" for name, value in told.items())
    return tuple(sorted(fits.union(also.values()))), f"{load.path} holds {holds}"


def _name(load: Load, scene: Scene) -> Said | None:
    saves = scene.saves
    number, ahead = number_in_name(load.path), _ahead(saves)
    if number is None or (ahead is None and any(_named(saves))):
        return None  # it counts something else: saves, epochs
    base = number - (ahead or 0)
    late = any(save.in_thread for save in saves)  # the number may also be that of an earlier step then
    if ahead is None:
        fits = tuple(range(base, base + 2 + scene.unseen * WARM))
    else:
        fits = tuple(range(min(number, base), base + 1)) if late else (base,)
    return fits, f"it is called {load.path}"


def _begun(save: Save) -> int | None:
    return save.global_step if save.begun_step is None else save.begun_step


def _ahead(saves: Sequence[Save]) -> int | None:
    """By how much the numbers in the names of saves are ahead of the steps. None if these numbers are no steps."""
    named = _named(saves)
    ahead = {number - done for number, done in named}
    plain = len(named) > 1 or (ahead <= {-1, 0, 1} and not any(save.in_thread for save in saves))
    return ahead.pop() if len(ahead) == 1 and plain else None


def _named(saves: Sequence[Save]) -> set[tuple[int, int]]:
    named = ((number_in_name(save.path), _begun(save)) for save in saves)
    return {(number, done) for number, done in named if number is not None and done is not None}


_RECENT = 4  # so many values of a counter must each belong to one step, for the counter to be continued
_ON = 64  # the most steps by which a counter that had this value before may also have gone on from its newest value
_NOT_COMPARED = 0.5  # the trust in a log that was not yet compared with steps
_AS_FIRST = 0.2  # the trust in a log that is as far ahead of the attempt's steps as in the first attempt
# The trust that nothing was saved, if later saves were seen, and a counter would show a warm-up.
_SAVES_SEEN = 2.0
_FIRST_STATE = 0.2  # the trust in the state with which the job began


def hear(scene: Scene) -> list[Witness]:
    """All witnesses of the base."""
    state = _of_state(scene) or of_peers(scene)
    return [
        *state,
        *_of_other_state(scene, state),
        *of_files(scene),
        *_of_counter(names.OPTIMIZER, scene, "opt_step", scene.ahead),
        *_of_counter(names.SCHEDULER, scene, "sched_step", None),
        *of_content(scene),
        *_of_log(scene),
        *_of_start(scene),
    ]


def _of_state(scene: Scene) -> list[Witness]:
    """The witness of the state itself. A process that begins with the first state, or one that has it again after a
    load, may only have lost the weights."""
    found = scene.snapshots.began_with(scene.number, scene.after, scene.own)
    loads = not scene.alone and whole_loads(scene.loads)
    trust = _FIRST_STATE if found == (0,) and (scene.straight is None or loads) else 1.0
    rests_on = "to the bit, its parameters were those after that step"
    return [Witness(names.STATE, found, rests_on, trust=trust)] if found else []


def _of_other_state(scene: Scene, state: Sequence[Witness]) -> Iterator[Witness]:
    """The witnesses of the rest of the state. If no witness tells of the parameters (`state`): the moments and the
    random generators. Otherwise only the moments, if they are of another step: what is of one step was read from one
    file, and is one witness."""
    kinds = {"moments": names.MOMENTS, "rng": names.RNG}
    found = scene.snapshots.others_began_with(scene.number, scene.after, scene.own)
    for what, steps in found.items():
        if not state or (what == "moments" and all(each.contradicts(step) for each in state for step in steps)):
            yield Witness(kinds[what], steps, "to the bit, they were those after that step")


def _of_start(scene: Scene) -> list[Witness]:
    if scene.straight is not None:
        return [Witness(names.STRAIGHT, (scene.straight,), "the attempt was at this step before", trust=scene.trust)]
    if scene.first and (scene.alone or (_log_lead(scene) or 0) <= (scene.log_offset or 0) + 1):
        return [Witness(names.START, (0,), "it is the first attempt with steps")]
    if scene.blind or scene.saves or scene.loads:
        return []
    counted = any(each.opt_step is not None or each.sched_step is not None for each in scene.start)
    trust = _SAVES_SEEN if scene.saves_seen and counted else 1.0
    return [Witness(names.UNSAVED, (0,), "no attempt before it saved a checkpoint", trust=trust)]


def _of_counter(name: str, scene: Scene, column: str, ahead: Mapping[int, int] | None) -> list[Witness]:
    """The witness of a counter, by its first value. `ahead`: by rank, how far the counter is ahead of the training (see
    Scene); None: the counter's first value is not known."""
    by_rank = dict[int, Said]()
    firsts = {each.rank: each for each in reversed(scene.start) if getattr(each, column) is not None}
    for rank, first in firsts.items():
        own = [part.at(part.rank == rank) for part in scene.known]
        always = all(mine.attempts == part.attempts for mine, part in zip(own, scene.known, strict=True))
        value, lead = getattr(first, column), None if ahead is None else ahead.get(rank, 0)
        known, since = own if always else scene.known, first.local_step
        begun = [each for each in scene.start if each.rank == rank]
        if column == "opt_step" and any(each.skipped for each in begun):
            # Other updates may be skipped than before, so the value before the attempt's first step is compared.
            value, since = value - sum(not each.skipped for each in begun if each.local_step <= since), 0
        steps = _steps_at(value, known, column, lead)
        if fits := tuple(step - since for step in sorted(steps) if step >= since):
            stood = f"{getattr(first, column):g} when the attempt's step {first.local_step} was over"
            by_rank[rank] = fits, f"it stood at {stood}"
    found, on = grouped(name, by_rank), scene.straight
    if not scene.as_first or on is None:
        return found
    # In the first attempt the counter began anew here, too, and its steps were counted on.
    return [
        replace(each, fits=(on, *({*each.fits} - {on})), prefers_first=True) if on in each.fits else each
        for each in found
    ]


def _steps_at(value: float, known: Sequence[Executions], column: str, lead: int | None) -> set[int]:
    """The global steps after which the counter has the value `value`: as observed earlier or, if the counter counts
    steps, as computed. `lead`: by how much the counter is ahead of the steps; None if not known."""
    values = np.concatenate([np.zeros(0), *(part.column(column) for part in known)])
    steps = np.concatenate([np.zeros(0, np.int64), *(part.global_step for part in known)])[~np.isnan(values)]
    values = values[~np.isnan(values)]
    if seen := set(steps[values == value].tolist()):
        newest = int(steps.argmax())
        on = value - float(values[newest])
        return seen | ({int(steps[newest]) + int(on)} if 0 < on < _ON else set())
    if not math.isfinite(value):  # from a damaged record
        return set()
    first, last = float(values.min(initial=math.inf)), float(values.max(initial=-math.inf))
    if value < first:
        return set() if lead is None else {int(value) - lead}
    if value < last or any(
        len(set(steps[values == last - before].tolist())) != 1 for before in range(min(_RECENT, int(last - first) + 1))
    ):
        return set()
    return {int(steps[values == last].max()) + int(value - last)}


def _of_log(scene: Scene) -> list[Witness]:
    """The witness of the log. A log line may come before or after the end of its step in the journal, so it may be off
    by one."""
    ahead, offset = _log_lead(scene), scene.log_offset or 0
    if ahead is None or ahead < offset:
        return []
    base = ahead - offset
    near = tuple(candidate for candidate in (base - 1, base + 1) if candidate >= 0) if base else ()
    rests_on = f"its step numbers are {base} ahead of those of the attempt"
    if scene.log_offset is None and (base or scene.unseen):  # it may count from 0, or may not count a warm-up
        near = (*near, *range(base + 2, base + 2 + scene.unseen * WARM))
        return [Witness(names.LOG, (base, *near), rests_on, trust=_NOT_COMPARED)]
    as_first = base == scene.after  # it may count the steps of each attempt
    trust = _AS_FIRST if as_first else 1.0
    return [Witness(names.LOG, (base, *near), rests_on, trust=trust, prefers_first=True)]


def _log_lead(scene: Scene) -> int | None:
    own = zip(scene.own.mono_s.tolist(), (scene.own.local_step - scene.after).tolist(), strict=True)
    return log_lead(scene.lines, own) if scene.lines else None


def log_lead(lines: Iterable[tuple[float, int]], steps: Iterable[tuple[float, int]]) -> int | None:
    """By how much the step numbers in the log are usually ahead of the given steps. `lines`, `steps`: each (mono_s,
    step)."""
    leads = _log_leads(lines, steps)
    return leads.most_common(1)[0][0] if leads else None


def log_begins_again(lines: Iterable[tuple[float, int]], steps: Iterable[tuple[float, int]]) -> bool:
    """Whether the log counts the steps of one attempt in several ways, such as anew in each phase or epoch."""
    leads = [lead for lead, often in _log_leads(lines, steps).items() if often >= _RECENT]
    return bool(leads) and max(leads) - min(leads) > 1


def _log_leads(lines: Iterable[tuple[float, int]], steps: Iterable[tuple[float, int]]) -> Counter[int]:
    done = sorted(steps)
    times = [at for at, _step in done]
    highest = list(accumulate((step for _at, step in done), max))
    return Counter(number - highest[bisect_right(times, at) - 1] for at, number in lines if times and times[0] <= at)
