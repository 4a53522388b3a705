"""Dumps of torchcomms, and dumps in several folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.diagnosis.blame import diagnose
from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder

Make = Callable[..., Any]
ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    "op", ["all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast", "reduce", "all_reduce"]
)
def test_a_size_that_must_be_equal_is_not(dumps: Make, op: str) -> None:
    """In these operations each rank gives tensors of one size; the rank with another is blamed."""
    made = dumps(**{"0": ALL})
    made.call(ALL, "0", done=True)
    made.call((0, 1, 3), "0", op)
    made.call((2,), "0", op, size=9)
    assert made.diagnosis().culprits == {2}


@pytest.mark.parametrize("op", ["all_gather_v", "reduce_scatter_v", "all_to_all_v_single", "all_to_all", "scatter"])
def test_a_size_that_may_differ_is_no_fault(dumps: Make, op: str) -> None:
    """In these operations it may differ between ranks; the rank that is missing is blamed."""
    made = dumps(**{"0": ALL})
    made.call(ALL, "0", done=True)
    made.call((0, 1), "0", op)
    made.call((2,), "0", op, size=9)
    assert made.diagnosis().culprits == {3}


def _torchcomms(folder: Path, first: int, calls: Mapping[int, Sequence[tuple[str, str, bool]]]) -> Path:
    """Dumps in the form of torchcomms. `calls`: by rank, (group, operation, done) in their order, of which `first` are
    no longer in the buffer."""
    groups = {"world": "0, 1, 2", "pair": "0, 1"}
    for rank, made in calls.items():
        entries = [
            {
                "record_id": number, "collective_seq_id": number, "pg_id": 0, "process_group": [group, "ncclx"],
                "op_id": number, "p2p_seq_id": 0, "is_p2p": False, "profiling_name": f"ncclx:{op}",
                "input_sizes": [[8]], "output_sizes": [[8]], "input_dtypes": ["Float"], "output_dtypes": ["Float"],
                "retired": done, "state": "completed" if done else "scheduled",
                "time_created_ns": 1_700_000_000_000_000_000 + number, "timeout_ms": 600_000,
            }
            for number, (group, op, done) in enumerate(made)
        ]  # fmt: skip
        config = {name: {"name": name, "desc": "ncclx", "ranks": f"[{ranks}]"} for name, ranks in groups.items()}
        config = {name: group for name, group in config.items() if str(rank) in groups[name]}
        dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries[first:]}
        (folder / f"comm_lib_trace_rank_{rank}").write_text(json.dumps(dump))
    return folder


@pytest.mark.parametrize("message", ["send", "batch_op_issue"])
def test_numbers_that_count_all_groups(tmp_path: Path, message: str) -> None:
    """The numbers of torchcomms count the calls of all groups, and its messages do not say with whom: rank 2, which is
    not in the pair, has other numbers, and rank 1, which has not come, is blamed."""
    pair = [("pair", message, True), ("pair", "all_reduce", True)]
    late = [*pair, ("world", "all_reduce", True)]
    calls = {
        0: [*late, ("world", "all_reduce", False)], 1: late,
        2: [("world", "all_reduce", True), ("world", "all_reduce", False)],
    }  # fmt: skip
    assert diagnose(read_folder(_torchcomms(tmp_path, 0, calls))).culprits == {1}


def test_numbers_that_can_not_be_counted(tmp_path: Path) -> None:
    """If the buffer has lost its oldest calls, nobody can tell which calls belong together: none is blamed."""
    calls = {
        rank: [("pair", "all_reduce", True), ("pair", "send", True), ("world", "all_reduce", False)] for rank in (0, 1)
    }
    with pytest.raises(UsageError, match="oldest calls are missing"):
        read_folder(_torchcomms(tmp_path, 1, calls))


def _in_folders(folder: Path, names: dict[int, str]) -> Path:
    for rank, name in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / f"nccl_trace_rank_{rank}").rename(path)
    return folder


@pytest.mark.parametrize("between", ["", "dumps/"])
def test_a_folder_for_each_node(dumps: Make, between: str) -> None:
    """The dumps of all nodes are read together."""
    made = dumps(**{"0": ALL})
    made.call(ALL, "0", done=True)
    made.call((0, 1, 3), "0")
    names = {rank: f"node-{rank // 2}/{between}nccl_trace_rank_{rank}" for rank in ALL}
    (made.folder / "node-0").mkdir()
    (made.folder / "node-0" / "7").write_text("a process")
    found = diagnose(read_folder(_in_folders(made.write(), names)))
    assert found.culprits == {2}
    assert not any("node-" in problem for problem in found.problems)


def test_names_that_count_the_ranks_of_a_node(dumps: Make) -> None:
    """Two dumps of rank 0 and none of rank 2: the names do not say whose they are, and nobody is blamed."""
    made = dumps(**{"0": ALL})
    made.call((0, 1, 3), "0")
    folder = _in_folders(made.write(), {rank: f"node-{rank // 2}/nccl_trace_rank_{rank % 2}" for rank in ALL})
    with pytest.raises(UsageError, match=r"several dumps of ranks 0, 1, and none of ranks 2, 3; .* the global rank"):
        read_folder(folder)


def test_a_subfolder_that_is_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no dumps, and keeps nobody from the others, as in a folder such as /tmp."""
    (tmp_path / "gone").mkdir()
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("gone"):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match="no Flight Recorder dumps in it"):
        read_folder(tmp_path)
