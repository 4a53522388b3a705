"""Finds the releases of a package, installs chosen releases beside the installed ones, and runs a scenario with
them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from platformdirs import user_cache_path

from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.minimize.child_run import JUDGED, Child
from torchaos.harness.minimize.package_bisect import Passed, Pins, in_words
from torchaos.harness.record.environment import installed
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.record.rundir import results_in

# Finds the releases of a package, and installs chosen releases into folders that PYTHONPATH puts before the installed
# packages. Uses pip.


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
        """The packages that must be installed, as NAME==VERSION, so that the job has these releases: the packages
        themselves, unless this version is installed, and their missing dependencies. torch is never replaced. Raises
        NotInstallable."""
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
        `options`: options of pip. Raises NotInstallable."""
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
        """The job's PYTHONPATH with these releases. Raises NotInstallable."""
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


# Runs a scenario with chosen releases of packages. The verdict of an earlier call is used again.

# For a PYTHONPATH: the words of `torchaos run`, and a name for the run with a digest of all that may change a verdict.
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
        """Whether the recovery passes with these releases; None if the run is no evidence. Raises ChaosError if it was
        stopped, or if a run could not be made."""
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
