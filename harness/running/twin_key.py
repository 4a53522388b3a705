"""The key of a twin in the cache, and the check whether a twin in the cache is still valid.

The key is a digest of everything that could change the results of the job and is known before it runs. In case of
doubt, a fact is part of the key: a key that changes too often costs a run, but a stale twin makes the verdict wrong.

The key includes the sources that the job may use (`used`), and the environment variables that they name. A source
counts if something that counts already names it: the command, an import, a text such as "model.head" or "prepare.py".
So a note or an experiment beside the script does not make a twin stale. A source with the name of an installed module
always counts, because it would be imported instead.

Other files that a job reads are seen by its agent (agent/file_reads.py) while the twin runs. `Inputs` holds these
files; if one of them has changed, the twin is not used any more."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchaos.harness import agent, checkpoints, protocol, registry
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import Launcher
from torchaos.harness.protocol.wire import FAILED, LISTED, READ, WRITTEN
from torchaos.harness.record.environment import editable, importable, installed, job_python
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.scenario.checks import made

_MOST_BYTES = 1 << 20  # of a source; only this part is searched
_WORD = re.compile(rb"[A-Za-z_]\w*")
_IMPORT = re.compile(rb"\b(?:from\s+([\w.]+)\s+)?import\b\s*(\([^)]*\)|[^\n#;]*)")
_TEXT = re.compile(rb"""["']([\w./-]+)["']|([\w./-]+\.py)\b""")
_VARIABLE = re.compile(rb"""["']([A-Za-z_]\w*)["']|\$\{?([A-Za-z_]\w*)""")  # "EPOCHS", ${EPOCHS}
_ALWAYS = {"sitecustomize", "usercustomize"}  # Python itself imports them


def used(named: Iterable[Path], words: Iterable[str], there: Iterable[Path], importable: Collection[str]) -> set[Path]:
    """The files `named`, and the sources among `there` that may change the results of the job. `words`: the words of
    the command and of the environment that the scenario sets. `importable`: the names of installed modules."""
    by_name = defaultdict[str, list[Path]](list)
    for path in there:
        by_name[path.parent.name if path.stem in ("__init__", "__main__") else path.stem].append(path)
    found, seen = set(named), {*importable, *_ALWAYS, *_words(os.fsencode(" ".join(words)))}
    todo, new = [*found], seen
    while True:
        for name in by_name.keys() & new:
            todo += (path for path in by_name[name] if path not in found)
            found |= {*by_name[name]}
        if not todo:
            return found
        new = _names_in(todo.pop()) - seen
        seen |= new


def variables_in(sources: Iterable[Path]) -> set[str]:
    """The words in the sources that may be names of environment variables."""
    pairs = (pair for path in sources for pair in _VARIABLE.findall(start_of(path)))
    return {os.fsdecode(name) for pair in pairs for name in pair if name}


def start_of(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""


def _names_in(path: Path) -> set[str]:
    """The names of modules that a Python source may import or start. For any other file, all its words."""
    text = start_of(path)
    if path.suffix == ".py":
        text = b" ".join(part for pattern in (_IMPORT, _TEXT) for pair in pattern.findall(text) for part in pair)
    return _words(text)


def _words(text: bytes) -> set[str]:
    return {os.fsdecode(word) for word in _WORD.findall(text)}


_WHOLE = 1 << 26  # bytes; of larger files only size and modification time are compared
_MOST_READ_BYTES = 1 << 30  # bytes of all files together; beyond, only size and modification time are compared
_IGNORED = ("__pycache__",)  # made by every run

Stamp = tuple[int, int]  # size in bytes, modification time in nanoseconds
ABSENT: Stamp = (-1, 0)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a job. `files`: size, modification time and digest, by path. If a digest is empty, only size and
    time are compared; if it is None, the file changed while the job ran. `folders`: by path, a digest of the names in
    each folder that the job listed."""

    made_s: float  # seconds since the epoch, when the twin was started
    files: Mapping[str, tuple[int, int, str | None]]
    folders: Mapping[str, str]
    whole: bool = True  # whether all reads were recorded
    environment: Mapping[str, str] = field(default_factory=dict)  # digests by name; empty: the variable was not set

    @classmethod
    def of(cls, run: RunDir, made_s: float) -> Inputs:
        """The inputs of the job that has just ended in this run directory, without the files that the job wrote
        itself."""
        entries = [line for path in sorted(run.reads.glob("*")) for line in path.read_bytes().split(b"\0") if line]
        by_letter = {
            letter: {os.fsdecode(line[1:]) for line in entries if line[:1] == letter.encode()}
            for letter in (READ, LISTED, WRITTEN, FAILED)
        }
        written, left = by_letter[WRITTEN], _MOST_READ_BYTES
        files: dict[str, tuple[int, int, str | None]] = {}
        for path in sorted(by_letter[READ] - written):
            if os.path.isdir(path):
                continue
            size, changed_ns = stamp(Path(path))
            left -= min(max(size, 0), _WHOLE)
            found = digest(Path(path)) if left > 0 and 0 <= size <= _WHOLE else ""
            files[path] = (size, changed_ns, None if changed_ns >= made_s * 1e9 else found)
        own = {os.path.dirname(path) for path in written} | written
        named = variables_in(Path(path) for path in files if path.endswith(".py"))
        known = {name: _variable(name) for name in sorted(named) if name in os.environ or name.isupper()}
        folders = {path: _names(path) for path in sorted(by_letter[LISTED] - own)}
        return cls(made_s, files, folders, not by_letter[FAILED], known)

    def changed(self) -> str:
        """A clause about the first input that has changed since the twin was made. Empty if no change is known."""
        if not self.whole:
            return "the files that its job read are not known"
        for path, (size, changed_ns, was) in self.files.items():
            if why := self._changed(Path(path), (size, changed_ns), was):
                return f"{_shown(path)} {why}"
        moved = next((path for path, was in self.folders.items() if _names(path) != was), None)
        if moved:
            return f"{_shown(moved)} has other files in it"
        other = next((name for name, was in self.environment.items() if _variable(name) != was), None)
        return f"the variable {other} has changed" if other else ""

    def _changed(self, path: Path, then: Stamp, was: str | None) -> str:
        now = stamp(path)
        if was is None:
            return "was changed while its job ran"
        if now == then and now[1] < self.made_s * 1e9:
            return ""
        if then == ABSENT or now == ABSENT:
            return "" if then == now else "is there now" if then == ABSENT else "is no longer there"
        return "" if was and now[0] == then[0] and digest(path) == was else "has changed"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Inputs:
        """Reads what `to_json` wrote. Raises ValueError, KeyError or TypeError if the text is damaged."""
        raw = json.loads(text)
        files = {path: (int(entry[0]), int(entry[1]), entry[2]) for path, entry in raw["files"].items()}
        environment = dict(raw.get("environment", {}))
        return cls(float(raw["made_s"]), files, dict(raw["folders"]), bool(raw["whole"]), environment)


def stamp(path: Path) -> Stamp:
    """Size and modification time of a file. ABSENT if it can't be read."""
    try:
        found = path.stat()
    except OSError:
        return ABSENT
    return found.st_size, found.st_mtime_ns


def digest(path: Path) -> str:
    """A digest of a file's contents. For a large file, of its path, size and modification time."""
    try:
        if path.stat().st_size > _WHOLE:
            return str((str(path), *stamp(path)))
        return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
    except OSError as error:
        return f"can't be read: {error.strerror}"


def _shown(path: str) -> str:
    """The end of a path, which is enough to know the file on a line of a terminal."""
    return os.sep.join(Path(path).parts[-2:])


def digest_of(text: str) -> str:
    return hashlib.blake2b(os.fsencode(text), digest_size=12).hexdigest()


def _variable(name: str) -> str:
    return digest_of(os.environ[name]) if name in os.environ else ""


def _names(folder: str) -> str:
    try:
        names: Iterable[str] = os.listdir(folder)
    except OSError:
        names = ()
    kept = sorted(name for name in names if name not in _IGNORED)
    return hashlib.blake2b("\0".join(kept).encode(errors="surrogateescape"), digest_size=12).hexdigest()


# Environment variables with these prefixes change the results of a job. So do all variables that its sources name.
_ENV = ("TORCH", "PYTORCH", "CUDA", "NCCL", "GLOO", "OMP", "MKL", "PYTHON", "ATEN", "LD_", "HF_", "ACCELERATE", "PL_")
_NOT_SOURCES = {"node_modules", "site-packages", "__pycache__"}
# Settings that have no effect on a job without faults.
_NO_MATTER = ("timeout_s", "resubmit_times", "resubmit_delay_s", "resubmit_command", "resubmit_env", "attach_pid")
_MOST_FILES = 5000  # files of one folder
# Parts of the key whose entries have names, with the words before the name of a changed entry in a message.
_NAMED_PARTS = {"sources": "", "data": "", "environment": "the variable ", "installed": "the package ", "job": "job."}
_PLAIN_PARTS = {"machine": "the machine has changed", "observers": "torchaos has changed"}

Parts = dict[str, Any]


def key_of(plan: Plan) -> str:
    """The key, as 24 hexadecimal digits."""
    return key_in(parts_of(plan))


def key_in(parts: Parts) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=12).hexdigest()


def parts_of(plan: Plan) -> Parts:
    """All facts that go into the key, as JSON. If a fact may hold a secret, such as a variable, its digest is used."""
    python = job_python(plan.job.command)
    sources = _sources(plan, python)
    return {
        "job": {
            name: digest_of(json.dumps(value)) for name, value in asdict(plan.job).items() if name not in _NO_MATTER
        },
        "launcher": plan.launcher,
        "needs": [[*plan.hooks], [need.value for need in plan.collect]],
        "sources": {str(path): digest(path) for path in sources},
        "data": {str(path): [*stamp(path)] for path in _files_below(_named(plan, Path.is_dir))},
        "observers": [
            digest(path)
            for room in (agent, protocol, checkpoints)
            for path in sorted(Path(room.__path__[0]).rglob("*.py"))
        ],
        "installed": installed(python),
        "machine": [platform.machine(), platform.release(), platform.node(), os.cpu_count()],
        "environment": _environment(sources),
    }


def difference(parts: Parts, before: Parts) -> str:
    """A clause: the changes since a twin with the parts `before` was made. Empty if that twin is of another job, or was
    made for assertions with other needs."""
    if any(parts[name] != before[name] for name in ("launcher", "needs")):
        return ""
    if any(parts["job"][name] != before["job"].get(name) for name in ("command", "cwd", "env")):
        return ""
    for name, words in _NAMED_PARTS.items():
        now, then = parts[name], before[name]
        if changed := next((one for one in sorted({*now, *then}) if now.get(one) != then.get(one)), None):
            how = "is new" if changed not in then else "is gone" if changed not in now else "has changed"
            return f"{words}{_shown(changed) if words == '' else changed} {how}"
    return next((words for name, words in _PLAIN_PARTS.items() if parts[name] != before[name]), "")


def record_sources(plan: Plan, folder: RunDir) -> None:
    """Writes the artifact `sources` of a run that is about to start: `files`, as `sources_of` returns them; `unknown`:
    why they are not known."""
    unknown = where_else(plan)
    found = {"files": {} if unknown else sources_of(plan), "unknown": unknown}
    write_atomically(folder.artifacts / "sources.json", json.dumps(found, indent=1), private=True)


def sources_of(plan: Plan) -> dict[str, str]:
    """A digest of each source of the job, by its path relative to the job's working directory. So the sources of two
    checkouts in different places can be compared."""
    sources = _sources(plan, job_python(plan.job.command))
    return {os.path.relpath(path, plan.job.cwd): digest(path) for path in sources}


def where_else(plan: Plan) -> str:
    """A clause that says why the files of this machine are not the job's sources. Empty if they are."""
    if plan.job.attached:
        return "the job had been started before"
    launcher: Launcher = made(registry.find("launchers", plan.launcher), plan.job.settings)
    return launcher.sources_elsewhere


def sources_changed(plan: Plan, since_s: float) -> bool:
    """Whether a source of the job was changed after this time (seconds since the epoch)."""
    return any(stamp(path)[1] >= since_s * 1e9 for path in _sources(plan, job_python(plan.job.command)))


def _sources(plan: Plan, python: str) -> list[Path]:
    """The files that the command names, and the Python files that the job may use. These are searched in and below: the
    folders of scripts and modules that the command names, PYTHONPATH, and editable installations."""
    named = _named(plan, Path.is_file)
    scripts = [path.parent for path in named if path.suffix == ".py"]
    search = plan.job.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", "")).split(os.pathsep)
    folders = [*scripts, *_modules(plan), *(Path(plan.job.cwd) / part for part in search if part), *editable(python)]
    there = [path for path in _files_below(folders) if path.suffix == ".py"]
    names = importable(python)
    words = [*plan.job.command, *plan.job.env.values()]
    return sorted(used(named, words, there, names) if names else {*named, *there})


def _named(plan: Plan, fits: Callable[[Path], bool]) -> list[Path]:
    """The paths in the command for which `fits` is true, including those in `--option=PATH`, joined to the working
    directory of the job."""
    cwd = Path(plan.job.cwd)
    words = [part for word in plan.job.command for part in (word, word.partition("=")[2]) if part]
    return [cwd / word for word in words if fits(cwd / word)]


def _modules(plan: Plan) -> Iterator[Path]:
    """The folder of a module or package that is run by `-m`."""
    words = plan.job.command
    for option, name in pairwise(words):
        if option in ("-m", "--module"):
            top = Path(plan.job.cwd) / name.partition(".")[0]
            yield top if top.is_dir() else top.parent if top.with_suffix(".py").is_file() else top


def _files_below(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in sorted(set(folders)):
        count = 0
        for root, below, names in os.walk(folder):
            below[:] = sorted(name for name in below if _may_hold_sources(Path(root, name)))
            for name in sorted(names):
                if count < _MOST_FILES:
                    yield Path(root, name)
                count += 1
            if count >= _MOST_FILES:
                break


def _may_hold_sources(folder: Path) -> bool:
    return folder.name[0] != "." and folder.name not in _NOT_SOURCES and not (folder / "pyvenv.cfg").exists()


def _environment(sources: Iterable[Path]) -> dict[str, str]:
    found = variables_in(sources)
    return {
        name: digest_of(value) for name, value in os.environ.items() if name.startswith(_ENV) or name in found
    }  # fmt: skip
