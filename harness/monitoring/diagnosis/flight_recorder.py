"""Reads a folder of PyTorch Flight Recorder dumps: the pickles of NCCL, gloo and torchcomms, and the JSON form.

The files are not trusted. A pickle may hold only plain containers, text and numbers: nothing in it is called, and a
pickle that names a class or a function is refused. The memory for it is limited, because a few bytes of a pickle (a
memo index) can demand gigabytes. A torn pickle is read as far as possible.

Format: torch/csrc/distributed/c10d/FlightRecorder*, versions 2.0 to 2.10 (`collective_seq_id`) and before (`seq_id`);
torchcomms: comms/torchcomms/hooks/fr, whose numbers count the calls of all groups, and which does not mark sends and
recvs. A field that a version lacks is left out."""

from __future__ import annotations

import io
import json
import pickle
import re
import resource
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, NoReturn

from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.diagnosis.wait_graph import Call, Calls, RankCalls, ranges

_ROOM = 2 << 30  # bytes that unpickling may allocate


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}; a dump holds plain data only")


class _Torn(pickle._Unpickler):  # the unpickler that is written in Python, whose stack is accessible
    """Reads a pickle that ends early: open containers are closed, and the part that was read is returned."""

    find_class = _Plain.find_class
    stack: list[Any]
    metastack: list[list[Any]]

    def rescue(self) -> Any:
        with suppress(Exception):
            self.load()
        while self.metastack:
            items, self.stack = self.stack, self.metastack.pop()
            top = self.stack[-1] if self.stack else None
            if isinstance(top, list):
                top.extend(items)
            elif isinstance(top, dict):
                top.update(zip(items[::2], items[1::2], strict=False))
        return self.stack[0] if self.stack else None


def load(raw: bytes) -> tuple[Any, str]:
    """The object in a pickle, and a clause about damage (empty if there is none). Raises ValueError if nothing can be
    read, or if the pickle contains anything but plain data."""
    with warnings.catch_warnings(), _bounded():
        warnings.simplefilter("ignore")
        try:
            return _Plain(io.BytesIO(raw)).load(), ""
        except (EOFError, pickle.UnpicklingError) as error:
            if "names" in str(error) or "persistent" in str(error):
                raise ValueError(str(error)) from error
            why = str(error) or "it ends early"
        except (MemoryError, RecursionError) as error:
            raise ValueError("it needs too much memory") from error
        except Exception as error:  # damaged bytes may raise nearly any error
            why = f"{type(error).__name__}: {error}"
        try:
            found = _Torn(io.BytesIO(raw)).rescue()
        except (MemoryError, RecursionError, AttributeError, TypeError):
            found = None
    if found is None:
        raise ValueError(f"it is no whole pickle: {why}")
    return found, f"it is torn: {why}"


@contextmanager
def _bounded() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + _ROOM
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_NAME = re.compile(r"rank[_-]?(\d+)[^/]*(?<!\.log)(?<!\.txt)$|(\d+)(?:\.(?:pkl|pickle|json|dump|trace|bin))?$")
_OF_A_DUMP = re.compile(r"rank|trace|dump|fr_", re.IGNORECASE)
_PAIR = re.compile(r"(send|recv)\s+(\d+)\s*(->|<-)\s*(\d+)")
_COALESCED = "coalesced"
_MOST_BYTES, _MOST_ENTRIES, _MOST_FILES = 256 << 20, 100_000, 20_000
_EQUAL_SIZES = frozenset({
    "all_reduce", "all_gather_base", "reduce_scatter_base", "all_gather_single", "reduce_scatter_single",
    "all_to_all_single", "broadcast", "reduce",
})  # fmt: skip
_UNPAIRED = ("send", "recv", "batch_op_issue")  # for these, torchcomms does not record the other rank


def read_folder(folder: Path) -> Calls:
    """Reads every file whose name ends in the number of a rank, as torch names its dumps. If the folder has no such
    file, reads those in its subfolders, such as one subfolder for each node. Raises UsageError if there is none, or if
    none can be read."""
    try:
        paths = sorted(path for path in folder.iterdir() if _NAME.search(path.name) and path.is_file())
        paths = paths or _in_subfolders(folder)
    except OSError as error:
        raise UsageError(f"{folder}: it can't be read: {error.strerror}") from error
    if not paths:
        raise UsageError(
            f"{folder}: no Flight Recorder dumps in it; their names end in the rank's number, "
            "as in nccl_trace_rank_0; set TORCH_FR_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT=1 to have them written"
        )
    found: dict[int, RankCalls] = {}
    problems: list[str] = []
    named: set[int] = set()
    unreadable: set[int] = set()
    for path in paths[:_MOST_FILES]:
        shown = path.relative_to(folder)
        try:
            raw, problem = _read(path)
            record = _rank_calls(raw, _rank_by_name(path), path.stat().st_mtime, torn=bool(problem))
        except (OSError, ValueError) as error:
            problems.append(f"{shown}: can't be used: {getattr(error, 'strerror', None) or error}")
            unreadable.add(_rank_by_name(path))
            continue
        problems += [f"{shown}: {problem}"] if problem else []
        named.add(record.rank)
        if record.says_nothing:
            problems.append(f"{shown}: it holds no collectives")
            continue
        if (earlier := found.get(record.rank)) is not None:
            problems.append(f"{shown}: a second dump of rank {record.rank}; the newer one is used")
            record = max(earlier, record, key=_newest)
        found[record.rank] = record
    if not found:
        raise UsageError(f"{folder}: none of its {len(paths)} dumps can be read: {problems[0]}")
    named |= unreadable
    world = sorted({*named, *(rank for record in found.values() for ranks in record.groups.values() for rank in ranks)})
    missing = [rank for rank in world if rank not in found and rank not in named]
    twice = [rank for rank, many in Counter(map(_rank_by_name, paths)).items() if many > 1]
    if twice and missing and paths[0].parent != folder:
        raise UsageError(
            f"{folder}: its folders have several dumps of {ranges(twice)}, and none of {ranges(missing)}; the number "
            "at the end of a dump's name must be the global rank, and all dumps must be of one attempt"
        )
    problems += [f"rank {rank}: there is no dump of it" for rank in missing]
    return Calls(_with_unique_names(found), tuple(problems), tuple(world), frozenset(unreadable - found.keys()))


def _in_subfolders(folder: Path) -> list[Path]:
    """The dumps in the subfolders or, if there are none, one level deeper. Here, a name that is a bare number does not
    count, and files of other programs, such as `gcov-dump-12`, are recognised by their first byte and left out."""
    for pattern in ("*/*", "*/*/*"):
        below = (folder / name for name in glob(pattern, root_dir=folder))  # Path.glob fails if a folder vanishes
        paths = [path for path in below if _OF_A_DUMP.search(path.name) and _NAME.search(path.name)]
        if found := sorted(path for path in paths if path.is_file() and _begins_as_a_dump(path)):
            return found
    return []


def _begins_as_a_dump(path: Path) -> bool:
    """Whether the file may be a dump, by its first byte: a pickle, JSON, zeros, or empty. A file that can't be read may
    be a dump, too."""
    try:
        with path.open("rb") as file:
            return file.read(1) in (b"", b"\0", b"\x80", b"{", b" ", b"\n")
    except OSError:
        return True


def _with_unique_names(ranks: dict[int, RankCalls]) -> dict[int, RankCalls]:
    """Renames groups that have the same name but other members, so that each group has a name of its own. This happens
    if groups were created only by their members."""
    members: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for record in ranks.values():
        for name, some in record.groups.items():
            members[name].add(some)
    shared = {name for name, some in members.items() if name and len(some) > 1}
    if not shared:
        return ranks
    return {rank: _with_other_names(record, shared) for rank, record in ranks.items()}


def _with_other_names(record: RankCalls, shared: set[str]) -> RankCalls:
    names = {name: f"{name} of {ranges(record.groups[name])}" for name in shared & record.groups.keys()}

    def renamed(by_group: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in by_group.items()}

    calls = [replace(call, group=names.get(call.group, call.group)) for call in record.calls]
    return replace(
        record,
        calls=calls,
        groups=renamed(record.groups),
        entered=renamed(record.entered),
        completed=renamed(record.completed),
    )


def _rank_by_name(path: Path) -> int:
    match = _NAME.search(path.name)
    return int((match[1] or match[2])[:9]) if match else -1


def _newest(record: RankCalls) -> float:
    return max((call.created_s or 0.0 for call in record.calls), default=0.0)


def _read(path: Path) -> tuple[Mapping[str, Any], str]:
    """The dump in a file, and a clause about its damage (empty if there is none). Raises OSError or ValueError if it
    can't be used."""
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"{size >> 20} MiB are more than any dump has")
    raw = path.read_bytes()
    if not raw.strip(b"\0 \n"):
        raise ValueError("it is empty")
    if raw.lstrip()[:1] == b"{":
        try:
            found, problem = json.loads(raw), ""
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
    else:
        found, problem = load(raw)
    if not isinstance(found, dict) or not ({"entries", "pg_status", "pg_config"} & found.keys()):
        raise ValueError("it is no Flight Recorder dump")
    return found, problem


def _rank_calls(dump: Mapping[str, Any], rank: int, written_s: float, torn: bool) -> RankCalls:
    groups = _groups(dump.get("pg_config"))
    sure = set.intersection(*map(set, groups.values())) if groups else set()
    if sure and rank not in sure and len(sure) == 1:  # the file was renamed; the groups in it show its rank
        (rank,) = sure
    kept = [entry for entry in _list(dump.get("entries"))[-_MOST_ENTRIES:] if isinstance(entry, dict)]
    entries = _numbered_by_group(kept[:-1] if torn else kept)  # the last entry may be incomplete
    status = {str(key): value for key, value in _dict(dump.get("pg_status")).items() if isinstance(value, dict)}
    torn = torn or _lacks_entries(entries, status)
    calls = _calls(entries, groups, status)
    entered, completed = _status(entries, groups, status, torn)
    clipped = not calls or calls[0].order > 0
    moving = not torn and _moving(entries, status)
    return RankCalls(rank, calls, groups, entered, completed, written_s, clipped, torn, moving, copied=True)


def _numbered_by_group(entries: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The entries, numbered by the collectives of each group, as torch numbers them. torchcomms numbers the calls of
    all groups together, so its entries are counted again. Raises ValueError if that is impossible, because older calls
    are missing."""
    counts = {_int(e.get("collective_seq_id"), -1) - _int(e.get("record_id"), -2) for e in entries}
    unpaired = any(_op(entry) in _UNPAIRED for entry in entries)
    if len(counts) != 1 or not (unpaired or len({_group_of(entry) for entry in entries}) > 1):
        return entries
    if min(_int(entry.get("record_id")) for entry in entries) > 0:
        raise ValueError("its numbers count the calls of all groups, and its oldest calls are missing")
    seen: Counter[str] = Counter()
    found = []
    for entry in entries:
        if _op(entry) not in _UNPAIRED:
            found.append({**entry, "collective_seq_id": seen[_group_of(entry)]})
            seen[_group_of(entry)] += 1
    return found


def _moving(entries: Sequence[Mapping[str, Any]], status: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a call had ended a moment before the dump.

    When torch writes a dump, it asks the device which calls have ended. Ten times a second, torch's watchdog retires
    ended calls and updates the status. So if a call has ended and the status does not show it, the call ended at most a
    tenth of a second before the dump."""
    over = [entry for entry in entries if entry.get("state") == "completed"]
    if any(
        entry.get("retired") is True for entry in over
    ):  # if none is marked, this recorder may not mark calls as retired
        return any(entry.get("retired") is False for entry in over)
    if over or any(entry.get("retired") for entry in entries):
        return False
    active = Counter(str(entry.get("pg_id")) for entry in entries)  # the dump holds only calls under way
    messages = {str(entry.get("pg_id")) for entry in entries if entry.get("is_p2p")}  # their numbers have gaps
    under_way = {  # in the status, -1 means no call yet, and calls count from 1
        name: max(0, _int(group.get("last_enqueued_collective"))) - max(0, _int(group.get("last_completed_collective")))
        for name, group in status.items()
    }
    return bool(active) and any(many > active[name] for name, many in under_way.items() if name not in messages)


def _lacks_entries(entries: Sequence[Mapping[str, Any]], status: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the dump has no entries although its status says that a call is under way."""
    return not entries and any(
        _int(group.get("last_enqueued_collective"), -1) > _int(group.get("last_completed_collective"), -1)
        for group in status.values()
    )


def _groups(raw: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, group in _dict(raw).items():
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, str):
            ranks = [int(number) for number in re.findall(r"\d+", ranks[: 1 << 20])]
        if isinstance(ranks, list) and ranks:
            found[str(name)] = tuple(sorted({_int(rank) for rank in ranks}))
    return found


def _status(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, Any], status: Mapping[str, Mapping[str, Any]], torn: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """The highest numbers entered and completed, by group, for groups without entries.

    In a torn dump, groups with entries are included, too, except groups with sends and recvs, which the status also
    counts. The status lists the groups in the order in which they were created, and the names of groups are numbers in
    the same order. If the list of groups or the entries contradict this, the status is not used."""
    names = {str(entry.get("pg_id")): _group_of(entry) for entry in entries}
    ids = sorted(status, key=_int)
    in_order = sorted((name for name in groups if name.isdigit()), key=int)
    if len(ids) != len(groups) or len(in_order) != len(groups):
        return {}, {}
    order = dict(zip(ids, in_order, strict=True))
    if any(order.get(number, name) != name for number, name in names.items()):
        return {}, {}
    known = {_group_of(entry) for entry in entries if not torn or entry.get("is_p2p")}
    free = {name: status[number] for number, name in order.items() if name not in known}
    entered = {name: _int(state.get("last_enqueued_collective"), -1) for name, state in free.items()}
    completed = {name: _int(state.get("last_completed_collective"), -1) for name, state in free.items()}
    return entered, completed


def _calls(
    entries: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[int, ...]], status: Mapping[str, Any]
) -> list[Call]:
    """The calls, in their order. The parts of a coalesced call have no state of their own, so they get the state of the
    whole call."""
    wholes = {}
    sharing: dict[tuple[object, ...], int] = defaultdict(int)
    for entry in entries:
        sharing[_batch(entry)] += 1
        if _op(entry) == _COALESCED:
            wholes[_batch(entry)] = _done(entry)
    found = []
    for number, entry in enumerate(entries):
        op, batch = _op(entry), _batch(entry)
        done = _done(entry)
        last = _int(_dict(status.get(str(entry.get("pg_id")))).get("last_completed_collective"), -1)
        if batch in wholes:
            done = wholes[batch]
        elif sharing[batch] > 1 and entry.get("is_p2p"):
            done = done or _int(entry.get("p2p_seq_id")) <= last
        if op == _COALESCED and entry.get("is_p2p"):
            continue  # the parts of the call name the other ranks
        found.append(_call(entry, op, done, _int(entry.get("record_id"), number), groups))
    return sorted(found, key=lambda call: call.order)


def _batch(entry: Mapping[str, Any]) -> tuple[object, ...]:
    seq = entry.get("collective_seq_id", entry.get("seq_id"))
    return (_group_of(entry), bool(entry.get("is_p2p")), _int(seq), _int(entry.get("p2p_seq_id")))


def _call(entry: Mapping[str, Any], op: str, done: bool, order: int, groups: Mapping[str, tuple[int, ...]]) -> Call:
    group = _group_of(entry)
    pair, match = None, _PAIR.search(str(entry.get("profiling_name")))
    members = groups.get(group)
    if match and members and max(int(match[2]), int(match[4])) < len(members):
        mine, other = members[int(match[2])], members[int(match[4])]
        pair = (mine, other) if match[3] == "->" else (other, mine)
    created = entry.get("time_created_ns")
    started = entry.get("state") == "started" or bool(entry.get("time_discovered_started_ns"))
    return Call(
        order, group, match[1] if match else op, _int(entry.get("collective_seq_id", entry.get("seq_id"))), pair, done,
        started, _int(created) / 1e9 if created else None, () if match else _shape(entry, op), _where(entry),
        _about(entry, group), _int(entry.get("timeout_ms")) / 1e3 or None,
    )  # fmt: skip


def _done(entry: Mapping[str, Any]) -> bool:
    return (
        entry.get("state") == "completed"
        or entry.get("retired") is True
        or bool(entry.get("time_discovered_completed_ns"))
    )


def _op(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "?"))[:200].rpartition(":")[2].strip().lstrip("_").lower()


def _group_of(entry: Mapping[str, Any]) -> str:
    named = entry.get("process_group")
    return str(named[0])[:200] if isinstance(named, (list, tuple)) and named else str(entry.get("pg_id"))[:200]


def _about(entry: Mapping[str, Any], group: str) -> str:
    named = entry.get("process_group")
    words = str(named[1])[:100] if isinstance(named, (list, tuple)) and len(named) > 1 else ""
    return f"{words} ({group})" if words not in ("", "undefined", group) else f"group {group}"


def _shape(entry: Mapping[str, Any], op: str) -> tuple[object, ...]:
    if op not in _EQUAL_SIZES:
        return ()
    sizes = [tuple(_numel(size) for size in _list(entry.get(key))) for key in ("input_sizes", "output_sizes")]
    types = [tuple(str(dtype)[:40] for dtype in _list(entry.get(key))) for key in ("input_dtypes", "output_dtypes")]
    return (*sizes, *types) if any(sizes) else ()


def _numel(size: Any) -> int:
    total = 1
    for length in _list(size):
        total *= _int(length)
    return total


def _where(entry: Mapping[str, Any]) -> str:
    """The innermost frame outside torch, in words. Empty if there is none."""
    for frame in _list(entry.get("frames"))[:200]:
        if isinstance(frame, dict) and "/torch/" not in (file := str(frame.get("filename", ""))) and file:
            return f"{frame.get('name')} at {file}:{frame.get('line')}"[:300]
    return ""


def _dict(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else []


def _int(value: Any, otherwise: int = 0) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
