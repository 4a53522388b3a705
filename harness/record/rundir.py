"""The run directory: everything of one run in one folder, readable by its owner only. `judge` needs nothing else.

    scenario.yaml       the scenario file, unchanged; with the other job in it, if it was run with another job
    plan.json           the plan (plan.Plan)
    agent/plan.json     the plan for the ranks (plan.AgentPlan)
    agent/pages/*.page  one control page for each fault
    agent/manifests/    digests of each save, chunk by chunk (protocol/wire.py), if checkpoints are watched
    agent/reads/        the job's own files that each rank of a twin read (agent/file_reads.py)
    agent/imported      the modules that rank 0 of an exploration imported (agent/hooks.py)
    agent/stamps/       begin and end of each rank's last collectives, if an assertion needs them
    events/*.jsonl      the journal: one writer for each file, merged only on reading; `torchaos events` prints it
    logs/job-N.log      stdout and stderr of submission N, as they came
    undo/               undo.jsonl, and the saved copies for File handles
    job/                the folder `{run}` of the scenario: the job's own files
    artifacts/*.json    data from the collect stage: inventory.json, environment.json
    twins/N             a link to (or copy of) the record of the Nth twin
    result.json, report.html

Also reads the results of finished runs from run directories and from files of `--json`. These may have been moved, cut
off or damaged."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import Result


@dataclass(frozen=True)
class RunDir:
    root: Path

    @property
    def scenario(self) -> Path:
        return self.root / "scenario.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def agent_plan(self) -> Path:
        return self.root / "agent" / "plan.json"

    @property
    def pages(self) -> Path:
        return self.root / "agent" / "pages"

    @property
    def stamps(self) -> Path:
        return self.root / "agent" / "stamps"

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def reads(self) -> Path:
        return self.root / "agent" / "reads"

    @property
    def imported(self) -> Path:
        return self.root / "agent" / "imported"

    @property
    def undo(self) -> Path:
        return self.root / "undo"

    @property
    def job(self) -> Path:
        return self.root / "job"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def twins(self) -> Path:
        return self.root / "twins"

    @property
    def result(self) -> Path:
        return self.root / "result.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def create(self, finish: bool = False) -> RunDir:
        """Makes the folders with mode 0700. Raises UsageError if `root` exists, is a link, or can't be made. `finish`:
        `root` may exist already, if it belongs to this user and contains nothing but files of a run directory."""
        own = (self.events, self.logs, self.undo, self.job, self.artifacts, self.twins)
        folders = (self.pages.parent, self.pages, *own)
        try:
            if finish and os.path.lexists(self.root):
                self.own(self.root)
                self._only((*folders, self.plan, self.scenario))
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=finish)
            for folder in folders:
                folder.mkdir(mode=0o700, exist_ok=finish)
        except OSError as error:
            raise UsageError(
                f"{self.root}: the run directory can't be made: {error.strerror}; choose another --out"
            ) from error
        return self

    def _only(self, paths: Sequence[Path]) -> None:
        if strange := sorted(set(os.listdir(self.root)) - {path.name for path in paths}):
            raise UsageError(f"{self.root}: it contains {strange[0]}, so it is no run directory; choose another folder")
        self.own(*(path for path in paths if os.path.lexists(path)))

    def check(self) -> RunDir:
        """Returns this object. Raises UsageError unless `root` is a run directory of this user."""
        try:
            found = os.lstat(self.root)
        except OSError as error:
            raise UsageError(f"{self.root}: {error.strerror}; give a run directory, or latest") from error
        if stat.S_ISREG(found.st_mode):
            raise UsageError(f"{self.root}: this is a file; give a run directory, which `torchaos run` makes")
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise UsageError(f"{self.root}: not a directory of yours; copy it, and judge the copy")
        if not self.plan.is_file():
            raise UsageError(f"{self.root}: there is no plan.json in it; give the directory of one run")
        return self.own(*self._own_paths())

    def own(self, *paths: Path) -> RunDir:
        """Returns this object. Raises UsageError unless each path in it belongs to this user and is no link. Must be
        called before anything is read."""
        for path in paths:
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode) or found.st_uid != os.geteuid():
                problem = "a link" if stat.S_ISLNK(found.st_mode) else "another user's"
                raise UsageError(f"{path}: it is {problem}, which torchaos never makes; use an unchanged run directory")
        return self

    def _own_paths(self) -> Iterator[Path]:
        """All paths in the run directory except the job's own files."""
        for folder, below, names in os.walk(self.root):
            if Path(folder) == self.root and "job" in below:
                below.remove("job")
            yield from (Path(folder, name) for name in (*below, *names))


_MOST_BYTES = 32 << 20  # of a file


def result_in(folder: RunDir) -> Result:
    """The result of a run. Raises OSError if there is none, UsageError if it can't be read."""
    return Result.from_json(_json(folder.result))


def explored_in(home: Path) -> Result:
    """The result of an exploration. Raises OSError if there is none, UsageError if it can't be read."""
    raw = _json(home / "explored.json")
    return Result.from_json(raw.get("result") if isinstance(raw, dict) else None)


def results_in(path: Path) -> list[Result]:
    """The results in a file of `torchaos run --json`. Raises OSError if there is none, UsageError if it can't be
    read."""
    raw = _json(path)
    if not isinstance(raw, dict) or not isinstance(raw.get("results"), list):
        raise UsageError("there are no results in it")
    return [Result.from_json(result) for result in raw["results"]]


def commit_in(folder: RunDir) -> str:
    """The commit of the job's working directory, with `-dirty` if it had uncommitted changes; empty if not known."""
    try:
        found = _json(folder.artifacts / "environment.json")
    except (OSError, UsageError):
        return ""
    return str(found.get("commit") or "") if isinstance(found, dict) else ""


def _json(path: Path) -> object:
    with open(path, "rb") as file:
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise UsageError(f"it is larger than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is not JSON: {error}") from error
