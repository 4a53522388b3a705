"""The two real sets of 16 ranks, complete and damaged in many ways."""

from __future__ import annotations

import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.monitoring.diagnosis.blame import diagnose
from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder

RANKS = range(16)


def _copy(folder: Path, to: Path, but: int | None = None) -> Path:
    to.mkdir(exist_ok=True)
    for rank in RANKS:
        if rank != but:
            shutil.copy(folder / f"_dump_{rank}", to)
    return to


def test_the_injected_ranks_and_no_other(real: tuple[Path, set[int]]) -> None:
    """Both injected ranks are named, with evidence, and nobody else is."""
    folder, truth = real
    found = diagnose(read_folder(folder))
    assert found.culprits == found.suspects == truth
    assert found.confidence == "high"
    assert all(found.evidence[rank] for rank in truth)


def test_the_truth_is_never_read(real: tuple[Path, set[int]], tmp_path: Path) -> None:
    """Without the log of the injection, and with one that lies, the result is the same."""
    folder, _ = real
    expected = diagnose(read_folder(folder)).to_json()
    copied = _copy(folder, tmp_path / "set")
    assert diagnose(read_folder(copied)).to_json() == expected
    (copied / "fault_injection.log").write_text("Fault ranks: [3]\nRank 3, fault_type: GPU_ERROR\n")
    assert diagnose(read_folder(copied)).to_json() == expected


@pytest.mark.parametrize("seed", range(3))
def test_other_rank_numbers(real: tuple[Path, set[int]], tmp_path: Path, seed: int) -> None:
    """With the ranks dealt out anew, the same processes are named: nothing hangs on a number."""
    folder, truth = real
    new = list(RANKS)
    random.Random(seed).shuffle(new)
    for rank in RANKS:
        dump = pickle.loads((folder / f"_dump_{rank}").read_bytes())
        (tmp_path / f"_dump_{new[rank]}").write_bytes(pickle.dumps(_renumbered(dump, new), 2))
    assert diagnose(read_folder(tmp_path)).culprits == {new[rank] for rank in truth}


def _renumbered(dump: dict[str, Any], new: list[int]) -> dict[str, Any]:
    places = {}
    for name, group in dump["pg_config"].items():
        old = [int(rank) for rank in re.findall(r"\d+", group["ranks"])]
        members = sorted(new[rank] for rank in old)
        group["ranks"] = str(members)
        places[name] = [members.index(new[rank]) for rank in old]
    for entry in dump["entries"]:
        if entry["is_p2p"]:
            words = entry["profiling_name"].replace("<-", " <- ").replace("->", " -> ").split()
            place = places[entry["process_group"][0]]
            entry["profiling_name"] = " ".join(str(place[int(word)]) if word.isdigit() else word for word in words)
    return dump


def test_any_dump_may_be_missing(real: tuple[Path, set[int]], tmp_path: Path) -> None:
    """Without the dump of a healthy rank the same ranks are named; without a culprit's own the other one still is, and
    the missing one can't be ruled out. A missing dump is told of."""
    folder, truth = real
    for rank in RANKS:
        found = diagnose(read_folder(_copy(folder, tmp_path / str(rank), but=rank)))
        assert found.culprits == truth - {rank}, f"without rank {rank}"
        assert truth <= found.suspects
        assert any(f"rank {rank}:" in problem for problem in found.problems)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.4, 0.8, 0.95])
def test_any_dump_may_be_torn(real: tuple[Path, set[int]], tmp_path: Path, share: float) -> None:
    """Of a file that ends early nothing false follows: no other rank is named, and at most the torn one is missed."""
    folder, truth = real
    for rank in RANKS:
        copied = _copy(folder, tmp_path / str(rank))
        path = copied / f"_dump_{rank}"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        found = diagnose(read_folder(copied))
        assert truth - {rank} <= found.culprits <= truth, f"rank {rank} torn"
        assert truth <= found.suspects
        assert any(problem.startswith(f"_dump_{rank}: ") for problem in found.problems)


def test_without_the_status_of_the_groups(real: tuple[Path, set[int]], tmp_path: Path) -> None:
    """Versions of torch before the status was written: the entries alone do, and their absence."""
    folder, truth = real
    for rank in RANKS:
        dump = pickle.loads((folder / f"_dump_{rank}").read_bytes())
        del dump["pg_status"]
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump, 2))
    found = diagnose(read_folder(tmp_path))
    assert found.culprits == found.suspects == truth, found.lines()


def test_entries_may_be_missing(real: tuple[Path, set[int]], tmp_path: Path) -> None:
    """A dump without entries, by whose status something is under way, is taken for what it is: no other is named."""
    folder, truth = real
    for rank in RANKS:
        copied = _copy(folder, tmp_path / str(rank))
        dump = pickle.loads((folder / f"_dump_{rank}").read_bytes())
        (copied / f"_dump_{rank}").write_bytes(pickle.dumps({**dump, "entries": []}, 2))
        found = diagnose(read_folder(copied))
        assert truth - {rank} <= found.culprits <= truth, f"rank {rank} without entries"


def test_several_dumps_may_be_missing(real: tuple[Path, set[int]], tmp_path: Path) -> None:
    """Without three of the dumps, whichever, nobody is named who was not hit."""
    folder, truth = real
    draw = random.Random(7)
    for number in range(12):
        copied = _copy(folder, tmp_path / str(number))
        for rank in draw.sample(RANKS, 3):
            (copied / f"_dump_{rank}").unlink()
        assert diagnose(read_folder(copied)).culprits <= truth


def test_all_over(real: tuple[Path, set[int]], tmp_path: Path) -> None:
    """The same calls, all of them over: nobody is to blame."""
    folder, _ = real
    for rank in RANKS:
        dump = pickle.loads((folder / f"_dump_{rank}").read_bytes())
        for entry in dump["entries"]:
            entry.update(state="completed", retired=True)
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump, 2))
    assert diagnose(read_folder(tmp_path)).culprits == set()


def test_a_renamed_file(real: tuple[Path, set[int]], tmp_path: Path) -> None:
    """Where a name contradicts the groups that a dump is in, the groups are believed."""
    folder, truth = real
    copied = _copy(folder, tmp_path / "set", but=14)
    shutil.copy(folder / "_dump_14", copied / "_dump_99")
    assert diagnose(read_folder(copied)).culprits == truth
