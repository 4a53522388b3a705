"""Delta debugging: finds the smallest part of a list of faults that still fails. The algorithm is ddmin (Zeller and
Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002). It tries subsets and then their complements, in
smaller and smaller parts, each in a child process. The result is 1-minimal: if any one of its faults is removed, it no
longer fails."""

from __future__ import annotations

import copy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from torchaos.harness.host.processes import wait_for
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.result import ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir, results_in
from torchaos.harness.scenario.loader import override, settled_scenario
from torchaos.harness.scenario.yaml_source import dumped, read

JUDGED = (ExitCode.PASSED, ExitCode.FAILED, ExitCode.INCONCLUSIVE)


@dataclass(frozen=True)
class Ran:
    code: int
    result: Result


class Child:
    """Runs one scenario at a time. A signal handler may call `stop`: then the run ends in order, and is judged."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = ""

    def stop(self, reason: str) -> None:
        """Ends the run in order. After a second call, the job gets no grace period."""
        self.stopped = self.stopped or reason
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def hurry(self, reason: str) -> None:
        self.stop(reason)

    def run(
        self, scenario: dict[str, Any], home: Path, seed: int, consent: Sequence[str], fds: Sequence[int] = ()
    ) -> Ran:
        """Runs the scenario in the new folder `home`, which gets scenario.yaml, console.log, results.json, and the run
        directory in run/. `fds`: file descriptors that the process also keeps open. Raises ChaosError if the run left
        no result."""
        home.mkdir(parents=True, mode=0o700)
        path = home / "scenario.yaml"
        path.write_text(dumped(scenario))
        consents = (word for name in consent for word in ("--consent", name))
        return self.call([str(path), "--seed", str(seed), *consents], home, fds)

    def call(self, words: Sequence[str], home: Path, fds: Sequence[int] = ()) -> Ran:
        """Runs `torchaos run` with these words; returns what `run` returns."""
        home.mkdir(parents=True, mode=0o700, exist_ok=True)
        command = [
            sys.executable, "-m", "torchaos.harness", "run", "--out", str(home / "run"),
            "--json", str(home / "results.json"), *words,
        ]  # fmt: skip
        with open(home / "console.log", "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, pass_fds=tuple(fds),
                start_new_session=True,
            )  # fmt: skip
            if self.stopped:
                self.stop(self.stopped)
            code = wait_for(self._process)
        return Ran(code, _result(home))


def _result(home: Path) -> Result:
    try:
        return results_in(home / "results.json")[0]
    except (OSError, IndexError, UsageError) as error:
        told = (home / "console.log").read_text(errors="replace").strip().splitlines()[-1:]
        raise ChaosError(f"{home}: the run left no result: {told[0] if told else error}") from error


Item = TypeVar("Item")


def ddmin(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """The smallest part of `items` for which `fails` was found to be true. `fails(items)` must be true. `fails` may be
    costly, and is called at most once for each part."""
    known: dict[tuple[int, ...], bool] = {}

    def still(part: Sequence[int]) -> bool:
        key = tuple(part)
        if key not in known:
            known[key] = fails([items[at] for at in part])
        return known[key]

    left, parts = list(range(len(items))), 2
    while len(left) >= 2:
        chunks = [left[n * len(left) // parts : (n + 1) * len(left) // parts] for n in range(parts)]
        complements = [[at for at in left if at not in chunk] for chunk in chunks] if parts > 2 else []
        smaller = next((part for part in (*chunks, *complements) if still(part)), None)
        if smaller is not None:
            parts = 2 if smaller in chunks else max(parts - 1, 2)
            left = smaller
        elif parts < len(left):
            parts = min(len(left), 2 * parts)
        else:
            break
    return [items[at] for at in left]


Tell = Callable[[str], None]


@dataclass(frozen=True)
class Tried:
    """One set of faults, and how many of its tries failed in the same way as the original run."""

    faults: tuple[str, ...]
    failed: int
    tries: int


@dataclass
class Shrink:
    """Finds the smallest set of faults with which a scenario still fails. `k` of `n` tries must fail. `home`: a new
    folder for the tries."""

    scenario: dict[str, Any]
    seed: int
    consent: tuple[str, ...]
    wrong: frozenset[str]  # the cases that failed
    home: Path
    n: int
    k: int
    tell: Tell
    child: Child = field(default_factory=Child)
    tried: list[Tried] = field(default_factory=list)

    @classmethod
    def of(cls, folder: RunDir, result: Result, home: Path, n: int, k: int, tell: Tell) -> Shrink:
        """Prepares to shrink a run. Raises UsageError if the run did not fail, or if its scenario is damaged."""
        if result.verdict is not Verdict.FAILED:
            raise UsageError(
                f"{folder.root}: that run is {result.verdict.value}, not failed: there is nothing to shrink"
            )
        try:
            plan = Plan.read(folder.plan)
            scenario = _scenario_of(folder, plan, result)
            ids = [name_of(fault) for fault in scenario["faults"]]
        except (UsageError, OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{folder.root}: it can't be shrunk, a file is missing or damaged: {error}") from error
        if plan.job.attached:
            raise UsageError(f"{folder.root}: its job ran already ({plan.job.attached}), so it can't be started again")
        if not ids:
            raise UsageError(f"{folder.root}: it has no faults: there is nothing to shrink")
        wrong = frozenset(case.name for case in result.cases if case.verdict is Verdict.FAILED)
        return cls(scenario, plan.seed, plan.consent, wrong, home, n, k, tell)

    def __call__(self) -> dict[str, Any] | None:
        """Returns the smallest scenario. None if all faults together no longer fail in k of n tries."""
        faults = self.scenario["faults"]
        if not self._fails(faults):
            return None
        return with_faults(self.scenario, ddmin(faults, self._fails))

    def _fails(self, faults: Sequence[dict[str, Any]]) -> bool:
        """Whether the scenario with these faults fails: tries until k runs have failed, or until k failures are no
        longer possible."""
        names = tuple(name_of(fault) for fault in faults)
        failed = tries = 0
        while failed < self.k and self.n - tries >= self.k - failed:
            home = self.home / f"{len(self.tried):03d}-{tries}"
            ran = self.child.run(_own_state(with_faults(self.scenario, faults), home), home, self.seed, self.consent)
            if self.child.stopped:
                raise ChaosError(f"it was ended: {self.child.stopped}; the runs so far are in {self.home}")
            if ran.code not in JUDGED:
                raise ChaosError(f"{home}: the run could not be made: {ran.result.reason}")
            tries += 1
            failed += any(case.name in self.wrong and case.verdict is Verdict.FAILED for case in ran.result.cases)
        self.tried.append(Tried(names, failed, tries))
        self.tell(f"{failed} of {tries} failed: {', '.join(names)}")
        return failed >= self.k

    def evidence(self) -> str:
        """A comment for the head of the new file."""
        lines = [f"the seed is {self.seed}; failed before and now: {', '.join(sorted(self.wrong))}; tried:"]
        lines += [f"  {tried.failed} of {tried.tries} failed: {', '.join(tried.faults)}" for tried in self.tried]
        return "".join(f"# {line}\n" for line in ("The scenario that is left when no fault can be removed;", *lines))


def _scenario_of(folder: RunDir, plan: Plan, result: Result) -> dict[str, Any]:
    """The scenario of a single run, with the values of --set, and with absolute paths, so that its file may be in any
    folder."""
    source = read(folder.scenario)
    words = shlex.split(result.reproduce)
    for word, value in pairwise(words):
        if word == "--set":
            override(source, value)
    scenario = settled_scenario(source.data, plan.job.cwd)
    scenario.pop("repeat", None)
    return scenario


def name_of(fault: dict[str, Any]) -> str:
    return str(fault.get("id") or fault["inject"])


def with_faults(scenario: dict[str, Any], faults: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The scenario with only these of its faults. If a fault waited for a removed fault, it gets the trigger of the
    removed fault."""
    whens = {name_of(fault): fault["when"] for fault in scenario["faults"]}
    kept = {name_of(fault) for fault in faults}
    found = copy.deepcopy(scenario)
    found["faults"] = [{**copy.deepcopy(fault), "when": _when(fault["when"], kept, whens)} for fault in faults]
    return found


def _when(when: dict[str, Any], kept: set[str], whens: dict[str, dict[str, Any]]) -> dict[str, Any]:
    after, seen = when.get("after"), set[str]()
    while after is not None and after not in kept and after not in seen:
        seen.add(after)
        after = whens[after].get("after")
    if after == when.get("after"):
        return dict(when)
    if after is not None:
        return {**when, "after": after}
    rest = {key: value for key, value in when.items() if key not in ("after", "state", "delay")}
    return rest if rest else {"time": when.get("delay", "0s")}


def _own_state(scenario: dict[str, Any], home: Path) -> dict[str, Any]:
    """If the rounds of a game day share the job's folder, gives each try a folder of its own, which is empty at
    first."""
    days = {str(path) for path in _folders(scenario)}

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        for day in days:
            value = value.replace(day, str(home / "job")) if isinstance(value, str) else value
        return value

    found: dict[str, Any] = moved(scenario)
    return found


def _folders(scenario: dict[str, Any]) -> set[Path]:
    """The folder `{day}` in the scenario of a round: the folder above the checkpoints that has a day.json beside it."""
    path = (scenario["job"].get("checkpoints") or {}).get("path", "")
    return {parent for parent in Path(path).parents if parent.name == "job" and (parent.parent / "day.json").exists()}
