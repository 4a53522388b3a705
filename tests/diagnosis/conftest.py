"""Dumps as torch writes them: the real sets, and small sets made by hand."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.monitoring.diagnosis.blame import diagnose
from torchaos.harness.monitoring.diagnosis.diagnosis import Diagnosis
from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder

DATA = Path(__file__).with_name("data")
T0 = 1_700_000_000.0


class Dumps:
    """The dumps of some ranks; each call adds an entry to a rank's ring buffer."""

    def __init__(self, folder: Path, groups: dict[str, Sequence[int]]) -> None:
        self.folder, self._groups = folder, groups
        self.of: dict[int, dict[str, Any]] = {}
        self._seqs: dict[tuple[int, str], int] = {}
        for rank in sorted({rank for ranks in groups.values() for rank in ranks}):
            mine = {
                name: {"name": name, "desc": f"group_{name}", "ranks": str(list(ranks))}
                for name, ranks in groups.items() if rank in ranks
            }  # fmt: skip
            self.of[rank] = {"version": "2.9", "pg_config": mine, "pg_status": {}, "entries": []}

    def call(
        self, ranks: Sequence[int], group: str, op: str = "all_reduce", done: bool = False, at: float = 0.0,
        size: int = 8, **more: Any,
    ) -> None:  # fmt: skip
        """These ranks call the next collective of the group."""
        for rank in ranks:
            seq = self._seqs[rank, group] = self._seqs.get((rank, group), 0) + 1
            self._add(rank, group, f"nccl:{op}", seq, 0, done, at, size, {"is_p2p": False, **more})

    def send(self, source: int, target: int, group: str, here: Sequence[int], done: bool = False) -> None:
        """A send and its recv, of which these ranks have called their own side."""
        members = list(self._groups[group])
        a, b = members.index(source), members.index(target)
        for rank in here:
            name = f"nccl:send {a}->{b}" if rank == source else f"nccl:recv {b}<-{a}"
            self._add(rank, group, name, self._seqs.get((rank, group), 0), 1, done, 0.0, 8, {"is_p2p": True})

    def _add(
        self, rank: int, group: str, name: str, seq: int, p2p: int, done: bool, at: float, size: int,
        more: dict[str, Any],
    ) -> None:  # fmt: skip
        entries = self.of[rank]["entries"]
        entries.append({
            "record_id": len(entries), "pg_id": 0, "process_group": (group, f"group_{group}"), "collective_seq_id": seq,
            "p2p_seq_id": p2p, "op_id": seq, "profiling_name": name, "input_sizes": [[size]], "output_sizes": [[size]],
            "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "completed" if done else "scheduled",
            "time_created_ns": int((T0 + at) * 1e9), "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None, "retired": done, "timeout_ms": 600_000, "frames": [], **more,
        })  # fmt: skip

    def write(self, as_json: bool = False) -> Path:
        for rank, dump in self.of.items():
            raw = json.dumps(dump).encode() if as_json else pickle.dumps(dump, 2)
            (self.folder / f"nccl_trace_rank_{rank}").write_bytes(raw)
        return self.folder

    def diagnosis(self) -> Diagnosis:
        return diagnose(read_folder(self.write()))


@pytest.fixture
def dumps(tmp_path: Path) -> Callable[..., Dumps]:
    """Makes a set of dumps for groups given as name=ranks."""
    return lambda **groups: Dumps(tmp_path, groups)


@pytest.fixture(params=["gpu_error_1st", "lock_gil_1st"])
def real(request: pytest.FixtureRequest) -> tuple[Path, set[int]]:
    """A real set, and the ranks that the faults hit."""
    folder = DATA / request.param
    truth = re.findall(r"^Rank (\d+),", (folder / "fault_injection.log").read_text(), re.M)
    return folder, set(map(int, truth))
