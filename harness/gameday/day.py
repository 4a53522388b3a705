"""Runs a game day, round by round. Each round has its own process, so many rounds need no more memory than one. The log
of this process shows what the round does. A game day whose process was ended is continued.

    gameday.yaml              the file as it was
    day.json                  the whole plan (Day); the rounds without a score.json are still to be done
    lock                      held by the process that runs the day, and by the current round
    job/                      the folder `{day}`: the job's own state from round to round
    rounds/NNN/scenario.yaml  the round as an ordinary scenario; run/: its run directories; console.log; results.json
    rounds/NNN/score.json     the score of the round (RoundScore), and how long the round took
    score.json, report.md and report.html     of the whole day"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar

from torchaos.harness.gameday.day_grammar import GameDay, Risk
from torchaos.harness.gameday.fault_outcomes import Outcome
from torchaos.harness.gameday.fault_schedule import SHORTEST_S, Round, scenario_of
from torchaos.harness.gameday.score import RoundScore, score_round
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.minimize.scenario_shrink import JUDGED, Child
from torchaos.harness.record.plan import counted, read_as, seconds_in_words
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import ExitCode
from torchaos.harness.record.rundir import RunDir

T = TypeVar("T")
_FORK = get_context("fork")  # fork is safe with one thread, and imports no module again


def apart(work: Callable[[], T]) -> T:
    """Returns the result of `work`, which runs in a child process. Raises the exceptions of `work`, and ChaosError if
    the process died."""
    ours, theirs = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_send, args=(theirs, work))
    process.start()
    theirs.close()
    try:
        found, error = ours.recv()
    except EOFError:
        process.join()
        raise ChaosError(f"the process that was to score the round died with exit code {process.exitcode}") from None
    process.join()
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def _send(end: Connection, work: Callable[[], object]) -> None:
    try:
        end.send((work(), None))
    except Exception as error:  # the caller raises the exception
        end.send((None, error))


EVERY_S = 1.0
_NEWS = (" hits ", " is applied", " missed", "the run is ended early")


@contextmanager
def following(log: Path, faults: Collection[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Passes to `tell` a line when one of the faults has ended, or the round has ended early. Reads `log`, the round's
    output, while the round runs."""
    over = Event()
    thread = Thread(target=_follow, args=(log, faults, tell, over), name="follow the round", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(log: Path, faults: Collection[str], tell: Callable[[str], None], over: Event) -> None:
    at, last = 0, False
    while not last:
        last = over.wait(EVERY_S)  # once more after the end of the round
        try:
            with open(log, "rb") as file:
                file.seek(at)
                text = file.read()
        except OSError:  # it is not there yet
            continue
        whole = text[: text.rfind(b"\n") + 1]
        at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            ours = any(fault in line for fault in faults) or "ended early" in line
            if ours and any(news in line for news in _NEWS):
                tell(f"  {line.strip()}")


@dataclass(frozen=True)
class Day:
    """The plan of a game day, as day.json holds it."""

    name: str
    seed: int
    here: str  # the folder of the game day's file
    overrides: tuple[str, ...]
    consent: tuple[str, ...]
    rounds: tuple[Round, ...]
    without: tuple[tuple[str, float, str], ...] = ()  # causes of the preset without a fault that can be applied here

    def to_json(self) -> dict[str, Any]:
        rounds = [
            {**asdict(game_round), "faults": [{**asdict(f), "risk": _risk(f.risk)} for f in game_round.faults]}
            for game_round in self.rounds
        ]
        return {**asdict(replace(self, rounds=())), "rounds": rounds}

    @classmethod
    def read(cls, folder: Path) -> Day:
        """Reads the plan of a game day. Raises UsageError if there is none, or if it is damaged."""
        try:
            return read_as(cls, (folder / "day.json").read_bytes())
        except OSError as error:
            raise UsageError(f"{folder}: no game day: {error.strerror}; give the directory of one") from error
        except ValueError as error:
            raise UsageError(f"{folder}/day.json: it is damaged: {error}; begin a new game day") from error


def _risk(risk: Risk) -> dict[str, Any]:
    """The fault as a mapping, as it is written in a game day's file."""
    lasts = {} if risk.for_ is None else {"for": f"{risk.for_:.3f}s"}
    return risk.model_dump(by_alias=True, exclude_none=True) | lasts


def _in_words(score: RoundScore) -> str:
    """The verdict of a round, and how its faults ended."""
    ended = Counter(fault.outcome.value for fault in score.faults)
    told = ", ".join(f"{many} {outcome}" for outcome, many in ended.items())
    return f"{score.verdict}{f', {told}' if told else ''}, {seconds_in_words(score.clock.wall_s)} since its first step"


class DayRun:
    """Runs a game day. A signal handler may call `stop` and `hurry`; then the current round ends in order."""

    def __init__(
        self, day: GameDay, plan: Day, folder: Path, keep: bool, tell: Callable[[str], None],
        child: Child | None = None,
    ) -> None:  # fmt: skip
        self._day, self._plan, self._folder, self._keep, self._tell = day, plan, folder, keep, tell
        self._child = child or Child()
        self.stop, self.hurry = self._child.stop, self._child.hurry

    def __call__(self) -> tuple[list[RoundScore], str]:
        """Returns the scores of all rounds so far, and the reason if the day ended early (else empty). Raises
        ChaosError if a round can't be carried out, UsageError if another process runs this day."""
        with self._locked() as lock:
            done, elapsed_s = self._earlier()
            why = ""
            for game_round in self._plan.rounds[len(done) :]:
                mine = self._in_time(game_round, elapsed_s)
                why = self._child.stopped or self._given_up(done)
                if why or (done and not mine.faults and mine.end_s - mine.start_s < SHORTEST_S):
                    break
                begun = time.monotonic()
                score = self._run(mine, lock)
                elapsed_s += time.monotonic() - begun
                left_s = max(0.0, self._day.duration - elapsed_s)
                self._tell(f"round {score.number}: {_in_words(score)}; {seconds_in_words(left_s)} of the day are left")
                if self._child.stopped and score.exit_code in JUDGED:  # a round that was cut short is no evidence
                    why = self._child.stopped
                    break
                self._write_score(score, elapsed_s)
                done.append(score)
                if score.exit_code not in JUDGED:
                    why = f"round {score.number}: {score.reason}"
                    break
            return done, why or self._given_up(done)

    def _in_time(self, one: Round, elapsed_s: float) -> Round:
        """The round, shortened to the end of the game day, without the faults that could not end by then. The rest
        period after a fault must fit in too. `elapsed_s`: seconds of the day that are over."""
        left = self._day.duration - elapsed_s
        rest = self._day.rest
        due = [f for f in one.faults if f.at_s - one.start_s + (f.risk.for_ or 0.0) + rest <= left]
        return replace(one, end_s=min(one.end_s, one.start_s + left), faults=tuple(due))

    def _given_up(self, done: Sequence[RoundScore]) -> str:
        many = self._day.give_up
        newest = done[-many:]
        stuck = [any(fault.outcome is Outcome.STUCK for fault in one.faults) for one in newest]
        return f"the job got stuck in {many} rounds, one after the other" if len(newest) == many and all(stuck) else ""

    def _run(self, one: Round, lock: int) -> RoundScore:
        home = self._home(one.number)
        if home.exists():  # an earlier process was ended in the middle of this round
            home.rename(home.with_name(f"{home.name}-cut-short-{time.time_ns()}"))
        scenario = scenario_of(self._day, one, Path(self._plan.here), self._folder / "job")
        names = [fault.id for fault in one.faults]
        number, of = one.number + 1, len(self._plan.rounds)
        self._tell(f"{datetime.now():%H:%M:%S} round {one.number} ({number} of {of}): {counted(len(names), 'fault')}")
        with following(home / "console.log", names, self._tell):
            ran = self._child.run(scenario, home, self._plan.seed, self._plan.consent, (lock,))
        folder, result = RunDir(Path(ran.result.run_dir)), ran.result
        if ran.code not in JUDGED:
            return RoundScore(one.number, result.verdict.value, result.reason, ran.code, result.run_dir)
        score = apart(lambda: score_round(one.number, Record.load(folder), result))
        if ran.code == ExitCode.PASSED and not self._keep:
            shutil.rmtree(folder.root)
        return score

    def _earlier(self) -> tuple[list[RoundScore], float]:
        """The scores of the rounds that an earlier process did, and the seconds that they took."""
        done, elapsed_s = list[RoundScore](), 0.0
        for game_round in self._plan.rounds:
            path = self._home(game_round.number) / "score.json"
            if not path.exists():
                break
            try:
                text = path.read_text()
                score, elapsed_s = read_as(RoundScore, text), float(json.loads(text)["elapsed_s"])
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{path}: it is damaged: {error}; remove it, and the round will be run again"
                ) from error
            if score.exit_code not in (*JUDGED, ExitCode.ROLLBACK):  # the round was never judged, and is run again
                break
            done.append(score)
        return done, elapsed_s

    def _write_score(self, score: RoundScore, elapsed_s: float) -> None:
        text = json.dumps({**score.to_json(), "elapsed_s": elapsed_s}, indent=1)
        write_atomically(self._home(score.number) / "score.json", text + "\n", private=True)

    def _home(self, number: int) -> Path:
        return self._folder / "rounds" / f"{number:03d}"

    @contextmanager
    def _locked(self) -> Iterator[int]:
        lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise UsageError(
                f"{self._folder}: this game day, or a round of it, is under way; wait for it, or `torchaos halt`"
            ) from error
        try:
            yield lock
        finally:
            os.close(lock)
