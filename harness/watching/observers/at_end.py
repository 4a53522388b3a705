"""What the ranks did when the run was about to end the job: evidence that is taken before anything is stopped."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchaos.harness.agent import stamps as stamped
from torchaos.harness.contracts import RankProcess
from torchaos.harness.watching.diagnosis import dumped, live, stacks
from torchaos.harness.watching.diagnosis.calls import ranges
from torchaos.harness.watching.diagnosis.stacks import Stack
from torchaos.harness.watching.observers.metrics import IDLE, Use

_APART_S = 1.0  # between the two looks
_MOST = 16  # frames of a stack that are kept
_PARTS = {"torch/utils/data/": "the data loader", "torch/autograd/": "backward"}
_WRAPPERS = frozenset({"wrapper", "_fn", "decorate_context", "wrapped"})
_STATES = {"T": "is stopped", "t": "is stopped", "D": "is asleep in the kernel"}


def look(ranks: Mapping[int, RankProcess], folder: Path | None) -> dict[str, Any]:
    """The payload of the event: what each rank does, and the diagnosis. `folder`: of the agents, None without them."""
    uses, first, last = {rank: Use() for rank in ranks}, dict[int, Stack](), dict[int, Stack]()
    for number in range(2):
        if number:
            time.sleep(_APART_S)
        for rank, use in uses.items():
            use.look(ranks[rank].pid, time.monotonic())
        first, last = last, _stacks(ranks, folder)
    found = live.diagnose(ranks, _world(ranks), folder and folder / "stamps", hangs=True, seen=last)
    if unread := sorted(ranks.keys() - last.keys()):
        found.problems.append(f"the stacks of {ranges(unread)} could not be had, neither by py-spy nor by the agent")
    if not ranks:
        found.problems.append("no rank was alive on this machine")
    open_ = _open(folder / "stamps", ranks) if folder else {}
    told = [
        _of_rank(rank, uses[rank], first.get(rank), last.get(rank), open_.get(rank)) for rank in sorted(ranks)
    ]  # fmt: skip
    return {"ranks": told, **found.to_json()}


def _stacks(ranks: Mapping[int, RankProcess], folder: Path | None) -> dict[int, Stack]:
    """The stacks by rank: by py-spy, which does not disturb a rank; the others from the agents."""
    py_spy = stacks.find_py_spy()
    by_pid = stacks.sample([process.pid for process in ranks.values()], py_spy) if py_spy else {}
    found = {rank: by_pid[process.pid] for rank, process in ranks.items() if process.pid in by_pid}
    if folder:
        found |= dumped.ask({rank: ranks[rank] for rank in ranks.keys() - found.keys()}, folder / "stacks")
    return found


def _world(ranks: Mapping[int, RankProcess]) -> int:
    return max((process.world_size for process in ranks.values()), default=0)


def _open(folder: Path, ranks: Mapping[int, RankProcess]) -> dict[int, str]:
    """The collective in which each rank is, in words."""
    found = {}
    for calls in stamped.read_folder(folder) if folder.is_dir() else ():
        under_way = [call for call in calls if call.open and not call.thread]
        if under_way and (process := ranks.get(under_way[0].rank)) and process.attempt == under_way[0].attempt:
            call = next((call for call in under_way if call.returned_mono_s is None), under_way[0])
            found[call.rank] = f"{call.op} {call.seq} of group {call.group}"
    return found


def _of_rank(rank: int, use: Use, first: Stack | None, last: Stack | None, collective: str | None) -> dict[str, Any]:
    waits = use.state in _STATES or (use.whole and use.cores <= IDLE and (first is None or first == last))
    verb = _STATES.get(use.state) or ("waits" if waits else "is busy")
    return {
        "rank": rank, "waits": waits, "verb": verb, "where": _where(last, collective),
        "cores": round(use.cores, 3) if use.whole else None,
        "stack": [str(frame) for frame in last.frames[:_MOST]] if last else [],
    }  # fmt: skip


def _where(stack: Stack | None, collective: str | None) -> str:
    """Where the rank is, in words, such as `in barrier 1 of group 1 (newest at train.py:48)`."""
    called = collective or (_called(stack) if stack else "")
    user = stack.user if stack else None
    at = f"{_name(user.file)}:{user.line}" if user else ""
    if user and not user.function.startswith("<"):
        at = f"{user.function} at {at}"
    if called:
        return f"in {called}" + (f" ({at})" if at else "")
    return f"in {at}" if at else f"at {stack.place}" if stack else ""


def _called(stack: Stack) -> str:
    """What the user's innermost frame called, in words; empty if it called nothing of Python."""
    user = stack.user
    inner = stack.frames[: stack.frames.index(user)] if user else stack.frames
    for part, words in _PARTS.items():
        if any(part in frame.file for frame in stack.frames):
            return words
    if inner and inner[-1].file.startswith("<frozen importlib"):
        return "an import"
    names = (frame.function.rpartition(".")[2] for frame in reversed(inner) if not frame.is_of_agent)
    return next((name for name in names if name not in _WRAPPERS and not name.startswith("<")), "")


def _name(file: str) -> str:
    return file.rpartition("/")[2]
