"""The contents of checkpoints, from the inventory after the run: their differences between two runs, which checkpoints
build upon others, and which of their files an attempt could not reach."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import final_path
from torchaos.harness.record.history import Save, saved_as
from torchaos.harness.record.plan import PlannedJob, counted
from torchaos.harness.record.record import Record

_NUMBER = re.compile(r"\d+")
_BLIND = ("limit", "unknown")  # kinds of problems that only say that something was not read


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run."""

    path: str  # below the checkpoint folder
    format: str
    step: int | None  # global: from the record of its save; if no save was seen, from the checkpoint itself
    saved_s: float | None  # when the save began, CLOCK_MONOTONIC; None: the save was not seen
    complete: bool  # marked as complete by its format
    loadable: bool
    problem: str | None
    tensors: Mapping[str, str]  # digest by name
    values: Mapping[str, str]
    closed: str = ""  # why it could not be read, if the reason is no damage
    sketches: Mapping[str, Sequence[float]] = field(
        default_factory=dict
    )  # of tensors; see checkpoints/tensor_values.py
    attempt: int | None = None  # the attempt that saved it; None: the save was not seen
    root: str = ""  # the checkpoint folder
    named: str = ""  # the checkpoint folder, with `{run}` instead of the run's own folder, as in `values`
    raced: bool = False  # its only known problem is that memory changed while it was saved
    ranks: tuple[int, ...] = ()  # that saved it
    builds_on: tuple[str, ...] = ()  # the names of all checkpoints without which this delta is of no use
    obstacle: str = ""  # everything that keeps it from being read, if nothing shows that bytes changed or are missing
    unread: Mapping[str, str] = field(default_factory=dict)  # digests of the bytes of its files that are not read
    unread_types: tuple[str, ...] = ()  # of those that may hold tensors

    @property
    def good(self) -> bool:
        """Whether the checkpoint is complete, loadable and without a problem. Loadable alone is not enough, because
        torch.load verifies no check sum."""
        return self.complete and self.loadable and not self.problem

    @property
    def at(self) -> str:
        return self.path if self.step is None else f"{self.path} (step {self.step})"


@dataclass(frozen=True)
class Clash:
    """One difference between the checkpoints of two runs at the same step."""

    step: int | None
    path: str
    kind: str  # tensor or value; checkpoint: the whole checkpoint is absent, or is of another step
    name: str
    ours: str | None
    theirs: str | None
    distance: float | None = None  # relative; None: the difference has no size


def checkpoints_of(record: Record) -> list[Checkpoint] | None:
    """The checkpoints in the inventory, ordered by step; checkpoints of unknown step come first. None: no inventory was
    taken, or it is malformed."""
    inventory = record.artifacts.get("inventory")
    if not isinstance(inventory, Mapping):
        return None
    listed = inventory.get("checkpoints")
    if not isinstance(listed, list) or not all(isinstance(raw, Mapping) and "path" in raw for raw in listed):
        return None
    found = [_checkpoint(record, root_of(record), raw) for raw in listed if not _is_other_data(record, raw)]
    return sorted(
        found,
        key=lambda checkpoint: (
            -1 if checkpoint.step is None else checkpoint.step,
            checkpoint.saved_s or 0.0,
            checkpoint.path,
        ),
    )


def root_of(record: Record) -> str:
    """The folder of the checkpoints. Empty if it is not known."""
    inventory = record.artifacts.get("inventory")
    return str(inventory.get("root") or "") if isinstance(inventory, Mapping) else ""


def is_below(path: str, root: str) -> bool:
    """Whether a path is in the folder of the checkpoints. True for every path if that folder is not known."""
    path, root = posixpath.normpath(path), posixpath.normpath(root)
    return root in (".", path) or path.startswith(f"{root}/")


def differing(ours: Checkpoint, theirs: Checkpoint) -> list[Clash]:
    """The entries of two checkpoints that are not bitwise equal. Values that are paths are equal if they differ only in
    the folder of the run."""
    found = [
        Clash(
            ours.step,
            ours.path,
            "tensor",
            name,
            ours.tensors.get(name),
            theirs.tensors.get(name),
            distance(ours, theirs, name),
        )
        for name in dict.fromkeys([*theirs.tensors, *ours.tensors])
        if ours.tensors.get(name) != theirs.tensors.get(name)
    ]
    here, there = _own_folders(ours.root, theirs.root)
    for name in dict.fromkeys([*theirs.values, *ours.values]):
        mine, other = ours.values.get(name), theirs.values.get(name)
        if mine != other and (mine is None or other is None or mine.replace(here, there) != other):
            found.append(Clash(ours.step, ours.path, "value", name, mine, other, _far(mine, other)))
    return found


def distance(checkpoint: Checkpoint, other: Checkpoint, name: str) -> float | None:
    """The norm of the difference of two tensors, relative to the larger norm, estimated from their sketches (see
    checkpoints/tensor_values.py). A difference below about 1e-9 gives 0. None if it is not known, because the tensors
    hold integers or NaN, or have no sketch."""
    ours, theirs = checkpoint.sketches.get(name, ())[1:], other.sketches.get(name, ())[1:]
    if len(ours) < 2 or len(ours) != len(theirs):
        return None
    (norm, *sums), (other_norm, *other_sums) = ours, theirs
    apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(sums, other_sums, strict=True)) / len(sums))
    return apart / max(norm, other_norm) if apart else 0.0


def _problems(raw: Mapping[str, object], *kinds: str) -> list[str]:
    """The texts of a checkpoint's problems of these kinds; of all problems if no kind is given."""
    listed = raw.get("problems")
    problems = [problem for problem in listed if isinstance(problem, Mapping)] if isinstance(listed, list) else []
    return [str(problem.get("text")) for problem in problems if not kinds or problem.get("kind") in kinds]


def _raced(raw: Mapping[str, object]) -> bool:
    return bool(_problems(raw, "raced")) and _only(raw, "raced", "nan", *_BLIND)


def _only(raw: Mapping[str, object], *kinds: str) -> bool:
    """Whether a checkpoint has problems, all of these kinds."""
    return 0 < len(_problems(raw, *kinds)) == len(_problems(raw))


def _closed(raw: Mapping[str, object]) -> str:
    types = raw.get("unread")
    if isinstance(types, list) and types:
        return f"it holds files of the type {', '.join(map(str, types))}, which are not read"
    if raw.get("unopened"):
        return (
            "it can't be read without running code from its pickle, which torchaos never does; save only what "
            "torch.load(weights_only=True) accepts"
        )
    return next(iter(_problems(raw, *_BLIND)), "")


def unread_of(record: Record) -> str:
    """A clause that counts the files that may hold tensors and are not read; empty if there are none. Inventories of
    earlier versions list their types alone."""
    inventory = record.artifacts.get("inventory")
    types = inventory.get("unread") if isinstance(inventory, Mapping) else None
    number = counted(sum(types.values()), "file") if isinstance(types, Mapping) else "files"
    verb = "is there, and is" if number == "1 file" else "are there, and are"
    return f"{number} of the type {', '.join(map(str, types))} {verb} not read" if types else ""


def _far(ours: str | None, theirs: str | None) -> float | None:
    """The relative difference of two numbers. None if both are integers, or if a number is not finite."""
    try:
        a, b = float(ours or ""), float(theirs or "")
    except ValueError:
        return None
    whole = (ours or "").lstrip("-").isdecimal() and (theirs or "").lstrip("-").isdecimal()
    return None if whole or not (math.isfinite(a) and math.isfinite(b)) else abs(a - b) / max(abs(a), abs(b))


def _own_folders(our_root: str, their_root: str) -> tuple[str, str]:
    """The two paths without their common last parts. Both empty if nothing of a path would be left."""
    ours, theirs = our_root.split("/"), their_root.split("/")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ("/".join(ours), "/".join(theirs)) if ours and theirs else ("", "")


def _named(job: PlannedJob) -> str:
    """The checkpoint folder as the plan gives it, from `{run}` or the root on. Empty if the plan gives none."""
    parts = [job.cwd, job.checkpoints] if job.checkpoints else []
    start = max((n for n, part in enumerate(parts) if part.startswith(("{run}", "/"))), default=0)
    return posixpath.normpath(posixpath.join(*parts[start:])) if parts else ""


def _is_other_data(record: Record, raw: Mapping[str, object]) -> bool:
    """Whether a file is no checkpoint although it has a suffix of torch.save, such as a shard of a dataset that ends in
    .bin, or a replay buffer: it is of an unknown kind, and no save wrote it, although saves of this run were seen.
    Inventories of earlier versions called such a file unreadable."""
    path = str(raw["path"])
    is_unknown = (raw.get("format") == "unknown" and bool(_problems(raw, "unknown"))) or (
        raw.get("format") == "torch" and raw.get("step") is None and not raw.get("loadable")
        and path.endswith((".bin", ".pkl")) and bool(_problems(raw, "unreadable"))
    )  # fmt: skip
    saves = record.history.saves
    return is_unknown and bool(saves) and saved_as(posixpath.join(root_of(record), path), saves) is None


def _is_renamed(record: Record, path: str) -> bool:
    """Whether the job renames files with this name (apart from numbers) when they are complete. Otherwise a name such
    as `.model` is final."""
    old = (str(event.data["path"]) for event in record.of_kind(Kind.RENAMED))
    return _NUMBER.sub("#", path) in {_NUMBER.sub("#", posixpath.normpath(each)) for each in old}


def _names(raw: object) -> tuple[str, ...]:
    return tuple(map(str, raw)) if isinstance(raw, list) else ()


def _checkpoint(record: Record, root: str, raw: Mapping[str, object]) -> Checkpoint:
    path = str(raw["path"])
    save = saved_as(posixpath.join(root, path), record.history.saves)
    stated = raw.get("step")
    step = save.global_step if save and save.global_step is not None else stated if isinstance(stated, int) else None
    tensors, values, sketches = raw.get("tensors"), raw.get("values"), raw.get("sketches")
    problem, closed = raw.get("problem"), "" if tensors or values else _closed(raw)
    foreign = _problems(raw, "unknown") if raw.get("format") == "unknown" else []
    replaced = bool(save and save.ok and foreign)  # saves that are seen write formats that are known
    if replaced:
        problem, closed = f"{foreign[0]}, which is not what was saved", ""
    loads = bool(raw.get("loadable")) or _only(raw, *_BLIND)
    final = _only(raw, "unfinished") and bool(save and save.ok) and not _is_renamed(record, posixpath.join(root, path))
    problem = None if final else problem
    return Checkpoint(
        path, str(raw.get("format", "")), step, save.begun_s if save else None, bool(raw.get("complete")) or final,
        loads and not replaced, str(problem) if problem else None,
        tensors if isinstance(tensors, Mapping) else {}, values if isinstance(values, Mapping) else {}, closed,
        sketches if isinstance(sketches, Mapping) else {}, save.attempt if save else None, root,
        _named(record.plan.job), _raced(raw), save.ranks if save else (), _names(raw.get("builds_on")),
        "; ".join(_problems(raw)) if _only(raw, "unreadable", *_BLIND) else "",
        bytes_of if isinstance(bytes_of := raw.get("unread_files"), Mapping) else {}, _names(raw.get("unread")),
    )  # fmt: skip


_ASIDE = re.compile(r"\.(damaged|corrupt|bad|broken|old)$")


@dataclass(frozen=True)
class Deltas:
    """`links`: the names of all checkpoints on which a delta builds, by its name and the attempt that saved it (None:
    not known)."""

    links: Mapping[str, Mapping[int | None, frozenset[str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Record) -> Deltas:
        links: dict[str, dict[int | None, frozenset[str]]] = {}
        for one in checkpoints_of(run) or ():
            name = posixpath.basename(one.path)
            saved = None if _ASIDE.search(name) else one.attempt
            links.setdefault(_ASIDE.sub("", name), {})[saved] = frozenset(one.builds_on)
        return cls(links if any(named for each in links.values() for named in each.values()) else {})

    def builds(self, path: str, attempt: int, upon: str) -> bool | None:
        """Whether the checkpoint that contains `path`, saved in this attempt, builds upon the checkpoint at `upon`. If
        the save of this attempt is not known: True if a save of `path` in another attempt builds upon it, otherwise
        None. False if no checkpoint of the run builds upon another."""
        if not self.links:
            return False
        name = posixpath.basename(upon)
        names = {name, posixpath.splitext(name)[0]}
        for part in (part for part in final_path(path).split("/") if part in self.links):
            known = self.links[part]
            own = [known[saved] for saved in (attempt, None) if saved in known]
            if any(names & links for links in own or known.values()):
                return True
            if own:
                return False
        return None


DISK_LOST = "disk lost"  # `what` of an effect event: the local disk of `node` was emptied


def local_folder(run: Record) -> str:
    """The folder on the node's own disk. Empty if the scenario names none."""
    job, root = run.plan.job, root_of(run)
    if not (job.checkpoints and job.checkpoints_local and root):
        return ""
    return posixpath.join(root, posixpath.relpath(job.checkpoints_local, job.checkpoints))


@dataclass(frozen=True)
class OutOfReach:
    """The files of a checkpoint that no node of an attempt had."""

    nodes: tuple[int, ...]  # which had them
    paths: frozenset[str]


def out_of_reach(run: Record, saves: Iterable[Save], attempt: int, started_s: float) -> OutOfReach:
    """The files of a checkpoint that the attempt could not reach: they were only on nodes that it did not have, or
    whose disks were lost before it was started (`started_s`: CLOCK_MONOTONIC). Nodes that are not known count as
    present."""
    local, root = local_folder(run), root_of(run)
    node_of = {(up.attempt, up.rank): up.data.get("node") for up in run.of_kind(Kind.RANK_UP)}
    there = {node for (number, _rank), node in node_of.items() if number == attempt}
    lost = [
        (event.data["node"], event.mono_s)
        for event in run.of_kind(Kind.EFFECT)
        if event.data.get("what") == DISK_LOST and event.mono_s < started_s
    ]
    nodes, paths = set[int](), set[str]()
    for save in saves:
        if is_below(save.path, root) and not (local and is_below(save.path, local)):
            continue
        had = {node_of.get((save.attempt, rank)) for rank in save.ranks}
        gone = {node for node in had if node is not None and there and node not in there}
        gone |= {node for node, lost_s in lost if node in had and lost_s > save.begun_s}
        if had and gone == had:
            nodes |= gone
            paths.add(save.path)
    return OutOfReach(tuple(sorted(nodes)), frozenset(paths))
