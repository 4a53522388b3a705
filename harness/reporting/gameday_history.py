"""The scores of game days ("nights"), in the history beside their folder, and comparisons between them. One row for
each night; `score` holds the whole score.json. A night is its own sample: its rounds are compared by the share of
training time, its faults by recovery and lost steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import Recovery, each_restart
from torchaos.harness.reporting import trend_store
from torchaos.harness.reporting.compare_runs import FLOOR_S, TOLERANCE, Change, Row, judged

_FLOOR_SHARE, _FLOOR_STEPS = 0.02, 1.0  # share of the time; steps. Smaller differences do not count


@dataclass(frozen=True)
class Night:
    """One game day. `commit`: the commit of the job's working directory; empty if there is none. `raw`: the contents of
    score.json."""

    folder: str
    name: str
    seed: int
    started: str
    commit: str
    verdict: str
    why: str
    ettr: float | None  # the share of the time in which training went on
    idle: tuple[float, ...]  # for each round, the share of the time in which training did not go on
    caught_up_s: tuple[float, ...]  # for each recovery
    lost_steps: tuple[float, ...]  # for each restart
    outcomes: Mapping[str, int]  # number of faults by outcome
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, folder: Path) -> Night:
        """The night in the folder of a game day. Raises UsageError if it has no readable score."""
        try:
            return cls.of_score(str(folder), json.loads((folder / "score.json").read_text()))
        except OSError as error:
            why = f"{folder}: no score: {error.strerror}; `torchaos gameday --resume` finishes the day"
            raise UsageError(why) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"{folder}/score.json: it is damaged: {error!r}") from error

    @classmethod
    def of_score(cls, folder: str, raw: Mapping[str, Any]) -> Night:
        """The night from the contents of score.json. Raises KeyError, ValueError, TypeError or AttributeError if it is
        not a score."""
        about = {key: str(raw[key]) for key in ("name", "started", "commit", "verdict")}
        shares = [_share(game_round["clock"]) for game_round in raw["rounds"]]
        faults = [fault for game_round in raw["rounds"] for fault in game_round["faults"]]
        lost = [
            one.lost_steps for game_round in raw["rounds"]
            for one in each_restart(map(_recovery, game_round["faults"])) if one.lost_steps is not None
        ]  # fmt: skip
        return cls(
            folder, **about, seed=int(raw["seed"]), why="; ".join(raw["why"]), ettr=_share(raw["score"]["clock"]),
            idle=tuple(1 - share for share in shares if share is not None),
            caught_up_s=tuple(float(at) for fault in faults if (at := fault["parts"].get("caught_up")) is not None),
            lost_steps=tuple(map(float, lost)),
            outcomes=Counter(fault["outcome"] for fault in faults), raw=raw,
        )  # fmt: skip


def _recovery(fault: Mapping[str, Any]) -> Recovery:
    return Recovery(str(fault["id"]), fault["parts"], fault["lost_steps"], at_s=fault.get("at_s"))


def _share(clock: Mapping[str, float]) -> float | None:
    whole = sum(clock.values())
    return clock["productive_s"] / whole if whole else None


def add(path: Path, nights: Sequence[Night]) -> None:
    """Adds nights to the history at `path`. A night that is already there is replaced. Raises UsageError."""
    rows = (
        (night.folder, night.name, night.seed, night.started, night.commit, night.verdict, json.dumps(night.raw))
        for night in nights
    )
    trend_store.add_rows(path, "nights", rows)


def kept(path: Path, names: Sequence[str] = (), commit: str = "", beside: Sequence[Night] = ()) -> list[Night]:
    """The nights of the history at `path`, in order of time. `names`: only these (none: all). Only nights whose commit
    begins with the given text. `beside`: nights that are added if the file lacks them. Changes nothing."""
    rows = trend_store.rows_of(path, "nights", "folder", "score")
    found = {one.folder: one for one in (*(night for row in rows for night in _read(*row)), *beside)}
    wanted = (one for one in found.values() if not names or one.name in names)
    return sorted((one for one in wanted if one.commit.startswith(commit)), key=lambda one: one.started)


def _read(folder: str, raw: str) -> Iterator[Night]:
    with suppress(ValueError, KeyError, TypeError, AttributeError):  # written by a later version
        yield Night.of_score(folder, json.loads(raw))


def found_in(out: Path) -> list[Night]:
    """Every game day that has a score, directly below a folder, in order of time."""
    return sorted(trend_store.each_in(out, "score.json", Night.of), key=lambda one: one.started)


def compare_nights(before: Sequence[Night], after: Sequence[Night], tolerance: float = TOLERANCE) -> list[Row]:
    """A row for each game day and measure, ordered by name. `tolerance`: relative, for times."""
    rows: list[Row] = []
    for name in sorted({night.name for night in (*before, *after)}):
        old, new = ([one for one in side if one.name == name] for side in (before, after))
        if not new:
            rows.append(Row(name, "nights", str(len(old)), "0", Change.UNCLEAR, "there is no later night of it"))
        elif not old:
            rows.append(Row(name, "nights", "0", str(len(new)), Change.NEW, "there is no earlier one"))
        else:
            rows += _night(name, old, new, tolerance)
    return rows


def _night(name: str, old: Sequence[Night], new: Sequence[Night], tolerance: float) -> list[Row]:
    rows = [_verdict(name, old, new)]
    measures: tuple[tuple[str, str, float, Callable[[Night], Sequence[float]]], ...] = (
        ("time not training", "", _FLOOR_SHARE, lambda one: one.idle),
        ("caught up", " s", FLOOR_S, lambda one: one.caught_up_s),
        ("steps done again", "", _FLOOR_STEPS, lambda one: one.lost_steps),
    )
    for what, unit, floor, of in measures:
        early, late = ([value for one in side for value in of(one)] for side in (old, new))
        if early and late:
            judgement = judged(early, late, tolerance, floor)
            rows.append(Row(name, what, _middle(early, unit), _middle(late, unit), *judgement))
        elif early:
            rows.append(Row(name, what, _middle(early, unit), "not seen", Change.UNCLEAR, "it was seen before"))
    return rows


def _verdict(name: str, old: Sequence[Night], new: Sequence[Night]) -> Row:
    before, after = ({one.verdict for one in side} for side in (old, new))
    bad = [night for night in new if night.verdict in after - before - {"passed"}]
    change, why = Change.SAME, ""
    if bad:
        worst = next((night for night in bad if night.verdict != "inconclusive"), bad[0])
        change, why = Change.UNCLEAR if worst.verdict == "inconclusive" else Change.WORSE, worst.why
    elif after == {"passed"} != before:
        change = Change.BETTER
    return Row(name, "verdict", _counted(old), _counted(new), change, why)


def _counted(nights: Sequence[Night]) -> str:
    return ", ".join(f"{many} {verdict}" for verdict, many in Counter(night.verdict for night in nights).items())


def _middle(values: Sequence[float], unit: str) -> str:
    return f"{median(values):.3g}{unit} ({len(values)})"
