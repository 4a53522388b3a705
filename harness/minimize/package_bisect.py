"""Finds the releases of a package, or of several packages that are changed together, at which a recovery begins or
ceases to fail. pip installs the chosen releases into folders that PYTHONPATH puts before the installed packages.

Between two releases with different verdicts, the one in the middle is tried, as `git bisect` does. If a release has no
verdict, the nearest other release is tried instead. So the verdict is found to change between two neighbouring
releases, or between two that have only releases without a verdict between them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

from platformdirs import user_cache_path

from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.minimize.scenario_shrink import JUDGED, Child, ddmin
from torchaos.harness.record.environment import installed
from torchaos.harness.record.result import ExitCode, Result, Verdict
from torchaos.harness.record.rundir import results_in
from torchaos.harness.registry import suggest

ReleaseVerdict = Callable[[int], bool | None]  # of a number: passed, failed, or (None) no verdict
MOST_WITHOUT = 3  # after this many numbers without a verdict between its two ends, a change is not narrowed further


class Change(NamedTuple):
    """The verdict of `before` differs from that of `after`."""

    before: int
    after: int

    @property
    def is_exact(self) -> bool:
        return self.after == self.before + 1


def changes(count: int, verdict: ReleaseVerdict, known: Iterable[int] = (), samples: int = 0) -> list[Change]:
    """The changes of the verdict that were found between 0 and `count` - 1, in order. `verdict` may be costly, and is
    called at most once for each number.

    The two ends and the `known` numbers are tried first. If these have the same verdict, up to `samples` more numbers
    are tried, each in the middle of the widest gap. Between two tried numbers with the same verdict no change is found,
    and with different verdicts only one."""
    tried: dict[int, bool | None] = {}

    def ask(at: int) -> bool | None:
        if at not in tried:
            tried[at] = verdict(at)
        return tried[at]

    for at in (0, count - 1, *known):
        ask(at)
    while samples and len(set(tried.values()) - {None}) < 2 and len(tried) < count:
        low, high = max(pairwise(sorted(tried)), key=lambda pair: pair[1] - pair[0])
        ask((low + high) // 2)
        samples -= 1
    decided = sorted(at for at, found in tried.items() if found is not None)
    return [_narrowed(low, high, ask, tried) for low, high in pairwise(decided) if tried[low] != tried[high]]


def _narrowed(low: int, high: int, ask: ReleaseVerdict, tried: dict[int, bool | None]) -> Change:
    left = MOST_WITHOUT
    while left and (between := [at for at in range(low + 1, high) if at not in tried]):
        at = min(between, key=lambda number: abs(2 * number - low - high))
        found = ask(at)
        if found is None:
            left -= 1
        elif found == tried[low]:
            low = at
        else:
            high = at
    return Change(low, high)


Pins = Mapping[str, str]  # a version for each package
Passed = bool | None  # None: no verdict


@dataclass(frozen=True)
class Range:
    """The releases of a package that are searched for the bad release, oldest first."""

    package: str
    releases: Sequence[str]
    known: Sequence[str] = ()  # releases that are tried first

    @classmethod
    def of(cls, text: str, releases_of: Callable[[str], Sequence[str]], now: str | None) -> Range:
        """Reads NAME, NAME=FIRST..LAST, or with known releases between: NAME=1.0..1.2..1.5. Empty FIRST: the installed
        version, `now`. Empty LAST: the newest release. Raises UsageError if the text or a release is wrong."""
        package, _, span = text.partition("=")
        every = releases_of(package)
        first, *known, last = span.split("..") if ".." in span else [span, ""]
        first, last = first or now or "", last or every[-1]
        if not first:
            raise UsageError(f"{text}: {package} is not installed; write {package}=FIRST..LAST")
        for version in (first, *known, last):
            if version not in every:
                near = suggest(version, every)
                hint = f"did you mean {near}?" if near else f"there are {every[0]} to {every[-1]}"
                raise UsageError(f"{text}: there is no release {version} of {package} for this Python; {hint}")
        chosen = every[every.index(first) : every.index(last) + 1]
        if len(chosen) < 2 or not set(known) <= set(chosen):
            raise UsageError(f"{text}: write an older release, then a newer one, and others of them only between")
        return cls(package, chosen, known)


@dataclass(frozen=True)
class Found:
    """A change of the verdict between the releases `before` and `after` of one package. `beside`: the releases of the
    other packages."""

    package: str
    before: str
    after: str
    passed_before: bool
    is_exact: bool
    beside: Pins
    together: Sequence[str] = ()  # packages in `beside` that need their newer release for the change

    def __str__(self) -> str:
        kind = "begins" if self.passed_before else "ends"
        words = ("passed", "failed") if self.passed_before else ("failed", "passed")
        where = f"{self.package} {self.before} {words[0]}, {self.after} {words[1]}"
        if self.together:
            where += f", together with {in_words({name: self.beside[name] for name in self.together})}"
        if rest := {name: version for name, version in self.beside.items() if name not in self.together}:
            where += f", with {in_words(rest)}"
        if self.is_exact:
            return f"the failure {kind} with {self.package} {self.after}: {where}"
        return f"the failure {kind} between two releases, and those tried between them gave no verdict: {where}"


@dataclass
class Bisect:
    """Finds the releases at which the verdict changes. `verdict` is called once for each set of releases. `samples`: if
    both ends of a package have the same verdict, how many releases between them are tried."""

    ranges: Sequence[Range]
    verdict: Callable[[Pins], Passed]
    samples: int = 0
    tried: dict[tuple[tuple[str, str], ...], Passed] = field(default_factory=dict)

    def __call__(self) -> list[Found]:
        if len(self.ranges) == 1:
            return self._along(self.ranges[0], self.ranges)
        oldest, newest = self._asked([]), self._asked(self.ranges)
        if oldest is None or newest is None or oldest == newest:
            return []
        needed = ddmin(self.ranges, lambda part: self._asked(part) == newest)
        return [found for changed in needed for found in self._along(changed, needed)]

    def exit_code(self, found: Sequence[Found]) -> ExitCode:
        """The verdict with the newest releases. Inconclusive if they have no verdict, or if the release at which the
        verdict changed was not found."""
        newest, oldest = self._asked(self.ranges), self._asked([])
        if newest is None or oldest is None or (newest != oldest and not found) or not all(o.is_exact for o in found):
            return ExitCode.INCONCLUSIVE
        return ExitCode.PASSED if newest else ExitCode.FAILED

    def _along(self, line: Range, newer: Sequence[Range]) -> list[Found]:
        """The changes along the releases of one package, while the packages in `newer` have their last release."""
        pins = self._pins(newer)
        beside = {name: version for name, version in pins.items() if name != line.package}

        def ask(at: int) -> Passed:
            return self._ask({**pins, line.package: line.releases[at]})

        at = [line.releases.index(version) for version in line.known]
        return [
            Found(line.package, line.releases[low], line.releases[high], bool(ask(low)), high == low + 1, beside,
                  [range_.package for range_ in newer if range_ is not line])
            for low, high in changes(len(line.releases), ask, at, self.samples)
        ]  # fmt: skip

    def _asked(self, newer: Sequence[Range]) -> Passed:
        return self._ask(self._pins(newer))

    def _pins(self, newer: Sequence[Range]) -> Pins:
        return {range_.package: range_.releases[-1 if range_ in newer else 0] for range_ in self.ranges}

    def _ask(self, pins: Pins) -> Passed:
        key = tuple(sorted(pins.items()))
        if key not in self.tried:
            self.tried[key] = self.verdict(pins)
        return self.tried[key]


def in_words(pins: Pins) -> str:
    return ", ".join(f"{name} {version}" for name, version in pins.items())


class NotInstallable(ChaosError):
    """These packages can't be installed together with the installed packages."""


@dataclass(frozen=True)
class Packages:
    """The packages that a job's Python can get. `path`: the job's own PYTHONPATH."""

    python: str = sys.executable
    path: str = ""
    cwd: Path = Path()

    def releases(self, name: str) -> list[str]:
        """All releases in the package index that this Python can use, oldest first. Raises UsageError if there are
        none."""
        done = self._pip("index", "versions", name)
        line = next((line for line in done.stdout.splitlines() if line.startswith("Available versions:")), "")
        if not line:
            raise UsageError(f"{name}: pip finds no release of it: {_reason(done.stderr)}")
        return line.partition(":")[2].replace(",", " ").split()[::-1]

    def needed(self, pins: Mapping[str, str]) -> list[str]:
        """What must be installed, as NAME==VERSION, to give the job these releases: the packages whose installed
        version is another, and their missing dependencies. torch is never replaced. Raises NotInstallable if pip finds
        no such set."""
        asked = [f"{name}=={version}" for name, version in pins.items()]
        if torch := installed(self.python).get("torch"):
            asked.append(f"torch=={torch}")
        done = self._pip("install", "--dry-run", "--quiet", "--report", "-", *asked)
        if done.returncode:
            raise NotInstallable(_reason(done.stderr))
        found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
        return sorted(f"{package['name']}=={package['version']}" for package in found)

    def folder(self, packages: Sequence[str], *options: str) -> Path:
        """A folder with exactly these packages, as NAME==VERSION. A folder that an earlier call made is used again.
        `options`: options of pip. Raises NotInstallable if pip fails."""
        key = hashlib.sha256("\n".join([self._version(), *packages]).encode()).hexdigest()[:16]
        folder = user_cache_path("torchaos") / "packages" / key
        if folder.exists():
            return folder
        partial = folder.with_name(f"{key}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        done = self._pip("install", "--quiet", "--no-deps", "--target", str(partial), *options, *packages)
        if done.returncode:
            shutil.rmtree(partial, ignore_errors=True)
            raise NotInstallable(_reason(done.stderr))
        (partial / "packages.txt").write_text("\n".join(packages) + "\n")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            shutil.rmtree(partial)  # another call has made the folder in the meantime
        return folder

    def path_with(self, pins: Mapping[str, str]) -> str:
        """The job's PYTHONPATH with these releases. Raises NotInstallable if they can't be installed together."""
        needed = self.needed(pins)
        parts = ([str(self.folder(needed))] if needed else []) + ([self.path] if self.path else [])
        return os.pathsep.join(parts)

    def _version(self) -> str:
        done = subprocess.run([self.python, "-VV"], capture_output=True, text=True, check=False)
        return done.stdout

    def _pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs pip for the job's Python. That Python need not have pip itself."""
        env = {**os.environ, "PYTHONPATH": self.path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        command = [sys.executable, "-m", "pip", "--python", self.python, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=self.cwd)


def _reason(text: str) -> str:
    return next((line for line in text.splitlines() if "ERROR" in line), "pip gives no reason")


# For a PYTHONPATH: the words of `torchaos run`, and a name for the run, which is a digest of all that may change the
# verdict.
Prepare = Callable[[str], tuple[list[str], str]]


@dataclass
class Tries:
    """Runs the scenario for sets of releases. `home`: a folder for the runs. `assertion`: if given, only this assertion
    counts."""

    packages: Packages
    prepare: Prepare
    home: Path
    assertion: str | None
    tell: Callable[[str], None]
    child: Child = field(default_factory=Child)
    runs: int = 0

    def __call__(self, pins: Pins) -> Passed:
        """Whether the recovery passes with these releases; None if the run is no evidence. Raises ChaosError if this
        was stopped, or if the run could not be made."""
        try:
            words, name = self.prepare(self.packages.path_with(pins))
        except NotInstallable as error:
            self._check_stopped()
            self.tell(f"no verdict    {in_words(pins)}: it can't be installed: {error}")
            return None
        result, when = self._result(words, name)
        found = passed(result, self.assertion)
        word = "no verdict" if found is None else "passed" if found else "failed"
        self.tell(f"{word:<12}  {in_words(pins)}{when}{_why(result, found)}")
        return found

    def _result(self, words: list[str], name: str) -> tuple[Result, str]:
        for number in count():
            home = self.home / f"{name}-{number}"
            if not home.exists():
                break
            result = _finished(home)
            if result and passed(result, self.assertion) is not None:
                return result, " (in an earlier call)"
        self._check_stopped()
        ran = self.child.call(words, home)
        self._check_stopped()
        if ran.code not in JUDGED:
            raise ChaosError(f"{home}: the run could not be made: {ran.result.reason}")
        self.runs += 1
        return ran.result, ""

    def _check_stopped(self) -> None:
        if self.child.stopped:
            raise ChaosError(f"it was ended: {self.child.stopped}; the same command goes on")


def _finished(home: Path) -> Result | None:
    try:
        return results_in(home / "results.json")[0]
    except (OSError, IndexError, UsageError):
        return None


def _why(result: Result, found: Passed) -> str:
    if not found:
        return f": {result.reason}"
    failed = [case.name for case in result.cases if case.verdict is Verdict.FAILED]
    return f", but the run failed by {', '.join(failed)}" if failed else ""


def passed(result: Result, assertion: str | None) -> Passed:
    """Whether the run passed; None if it is no evidence. If only one assertion counts, failures of others are
    ignored."""
    verdict = result.verdict
    if assertion and verdict is Verdict.FAILED:
        verdict = next((case.verdict for case in result.cases if case.name == assertion), Verdict.INCONCLUSIVE)
    return {Verdict.PASSED: True, Verdict.FAILED: False}.get(verdict)
