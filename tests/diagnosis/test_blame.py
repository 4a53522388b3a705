"""The culprits in sets made by hand: one test for each way in which ranks hold each other up, or seem to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.monitoring.diagnosis.blame import diagnose
from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder
from torchaos.harness.monitoring.diagnosis.wait_graph import Call, Calls, RankCalls, read_stamps
from torchaos.harness.protocol.collective_stamps import Stamps

ALL = (0, 1, 2, 3)
Make = Callable[..., Any]


def _history(made: Any, group: str = "0", ranks: tuple[int, ...] = ALL) -> None:
    for number in range(5):
        made.call(ranks, group, done=True, at=number * 0.1)


def test_a_rank_that_never_entered(dumps: Make) -> None:
    """The one that the others wait for is named."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 1, 3), "0", at=1.0)
    found = made.diagnosis()
    assert (found.culprits, found.suspects, found.confidence) == ({2}, {2}, "high")


def test_several_at_once(dumps: Make) -> None:
    """Two that are missing are both named."""
    made = dumps(**{"0": range(6)})
    _history(made, ranks=tuple(range(6)))
    made.call((0, 1, 3, 5), "0")
    assert made.diagnosis().culprits == {2, 4}


def test_a_chain_over_groups(dumps: Make) -> None:
    """0 waits for 1, which waits for 2, which waits for 3 in yet another group: only 3 is to blame."""
    made = dumps(a=(0, 1), b=(1, 2), c=(2, 3))
    made.call((0,), "a")
    made.call((1,), "b")
    made.call((2,), "c")
    made.call((3,), "c", done=True)
    made.of[3]["entries"].clear()
    made.of[3]["entries"].append({**made.of[2]["entries"][0], "collective_seq_id": 0, "retired": True})
    assert made.diagnosis().culprits == {3}


def test_a_pipeline(dumps: Make) -> None:
    """The last stage never takes what it is sent; the stages before it wait one for the other."""
    made = dumps(p=ALL, t=(3, 2))
    made.call(ALL, "p", done=True)
    made.send(0, 1, "p", here=(0, 1), done=True)
    made.send(1, 0, "p", here=(0,))
    made.send(2, 1, "p", here=(1,))
    made.send(3, 2, "p", here=(2,))
    assert made.diagnosis().culprits == {3}


def test_a_send_that_nobody_takes_does_not_hide_its_sender(dumps: Make) -> None:
    """Rank 0 has an asynchronous send under way to a rank that waits for rank 0 elsewhere."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.send(0, 1, "0", here=(0,))
    made.call((1, 2, 3), "0")
    assert made.diagnosis().culprits == {0}


def test_the_parts_of_a_coalesced_call_share_its_state(dumps: Make) -> None:
    """Torch never ends the entries of the parts; that of the whole says that they are over."""
    made = dumps(**{"0": (0, 1)})
    made.send(0, 1, "0", here=(0, 1))
    made.send(1, 0, "0", here=(0, 1))
    for rank in (0, 1):
        made.of[rank]["entries"].append(
            {**made.of[rank]["entries"][-1], "profiling_name": "nccl:coalesced", "retired": True}
        )
    assert made.diagnosis().suspects == set()


def test_another_operation(dumps: Make) -> None:
    """One calls something else at the same number: it left a call out, or has its own order."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 2, 3), "0", "broadcast")
    made.call((1,), "0", "all_reduce")
    found = made.diagnosis()
    assert found.culprits == {1}
    assert "all_reduce" in found.evidence[1][0]


def test_another_size(dumps: Make) -> None:
    """One gives another size; an all_to_all may."""
    made = dumps(**{"0": ALL})
    made.call((0, 1, 2), "0")
    made.call((3,), "0", size=9)
    assert made.diagnosis().culprits == {3}


def test_uneven_all_to_all(dumps: Make) -> None:
    """Sizes that may differ are no mismatch."""
    made = dumps(**{"0": ALL})
    made.call((0, 1, 2), "0", "all_to_all")
    made.call((3,), "0", "all_to_all", size=9)
    assert made.diagnosis().culprits == set()


def test_a_different_order_of_groups(dumps: Make) -> None:
    """Three wait in one group for the fourth, which waits for them in another: the few are in the wrong place."""
    made = dumps(a=ALL, b=ALL)
    made.call(ALL, "a", done=True)
    made.call(ALL, "b", done=True)
    made.call((0, 1, 2), "a")
    made.call((3,), "b")
    found = made.diagnosis()
    assert (found.culprits, found.confidence) == ({3}, "medium")


def test_two_that_wait_for_each_other(dumps: Make) -> None:
    """One against one can't be told: both are suspects, nobody is named."""
    made = dumps(a=(0, 1), b=(0, 1))
    made.call((0, 1), "a", done=True)
    made.call((0, 1), "b", done=True)
    made.call((0,), "a")
    made.call((1,), "b")
    found = made.diagnosis()
    assert (found.culprits, found.suspects) == (set(), {0, 1})


def test_a_device_that_never_started(dumps: Make) -> None:
    """All have called it, the devices of all but one have begun."""
    made = dumps(**{"0": ALL})
    made.call((0, 1, 3), "0", state="started")
    made.call((2,), "0")
    assert made.diagnosis().culprits == {2}


def test_a_host_that_is_still_inside_its_call(tmp_path: Path) -> None:
    """On a GPU a collective returns before it is over. A rank that is held inside its call has not handed it to the
    device, and the others wait there: they have returned, and have later calls under way. With two ranks, too."""
    for world in (2, 4):
        folder = tmp_path / str(world)
        folder.mkdir()
        for rank in range(world):
            own = Stamps(folder / f"rank{rank}-a0-p{rank}.stamps", rank, 0, rank)
            group = own.group("0", range(world))
            first, held = own.begin("all_reduce", group, 4096, 5), own.begin("all_reduce", group, 4096, 5)
            own.returned(first)
            own.ended(first)
            if rank != 1:
                own.returned(held)
                own.returned(own.begin("all_reduce", group, 64, 5))
        found = diagnose(read_stamps(folder))
        assert (found.culprits, found.suspects) == ({1}, {1}), found.evidence
        assert "inside" in found.evidence[1][0]


def test_a_rank_that_is_not_done_with_what_the_others_finished(dumps: Make) -> None:
    """Its own device or watchdog is dead."""
    made = dumps(**{"0": ALL})
    made.call((0, 1, 3), "0", done=True)
    made.call((2,), "0")
    made.call((0, 1, 2, 3), "0")
    assert made.diagnosis().culprits == {2}


def test_dead_without_a_dump(dumps: Make) -> None:
    """A rank without a dump is named where nothing else explains why the others wait, and no more surely than that."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 1, 3), "0")
    del made.of[2]
    found = made.diagnosis()
    assert (found.culprits, found.confidence) == ({2}, "medium")


def test_an_empty_dump_is_no_missing_one(dumps: Make) -> None:
    """A rank that left a file, empty as it is, was alive to do so: it is a suspect, and is not named."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 1, 3), "0")
    (made.write() / "nccl_trace_rank_2").write_bytes(b"")
    found = diagnose(read_folder(made.folder))
    assert (found.culprits, found.suspects) == (set(), {2})


def test_the_note_on_a_record_is_that_of_its_own_rank(dumps: Make) -> None:
    """Rank 1 left nothing, and only rank 12's dump can't be read: nobody is sent to notes on a record of rank 1."""
    made = dumps(**{"0": range(13)})
    _history(made, ranks=tuple(range(13)))
    made.call((0, *range(2, 12)), "0")
    folder = made.write()
    (folder / "nccl_trace_rank_1").unlink()
    (folder / "nccl_trace_rank_12").write_bytes(b"")
    found = diagnose(read_folder(folder))
    told = {rank: [why for why in found.evidence.get(rank, []) if "see the notes" in why] for rank in (1, 12)}
    assert (told[1], len(told[12])) == ([], 1), found


def test_two_dead_without_dumps(dumps: Make) -> None:
    """Both are named: whoever lives leaves a record."""
    made = dumps(**{"0": range(6)})
    _history(made, ranks=tuple(range(6)))
    made.call((0, 1, 2, 3), "0")
    del made.of[4], made.of[5]
    assert made.diagnosis().culprits == {4, 5}


def test_many_dumps_that_are_missing(dumps: Make) -> None:
    """Where several were not collected, none of those ranks is named, and all are suspects."""
    made = dumps(**{"0": range(8)})
    _history(made, ranks=tuple(range(8)))
    made.call((0, 1, 2, 3, 4), "0")
    for rank in (5, 6, 7):
        del made.of[rank]
    found = made.diagnosis()
    assert (found.culprits, found.suspects) == (set(), {5, 6, 7})


def test_a_copy_of_a_healthy_moment(dumps: Make) -> None:
    """The files' times are lost, one rank is about to enter what the others are in, and elsewhere a collective is in
    flight that nobody holds up: the job went on. With files written when the time-out was due, the rank is named."""
    made = dumps(a=(0, 1, 2, 3), b=(4, 5, 6, 7))
    _history(made, "a")
    _history(made, "b", (4, 5, 6, 7))
    made.call((0, 1, 3), "a", at=1.0)
    made.call((4, 5, 6, 7), "b", at=1.0)
    found = made.diagnosis()
    assert (found.culprits, found.confidence) == (set(), "low")
    assert 2 in found.suspects
    when = made.of[0]["entries"][-1]["time_created_ns"] / 1e9 + 610.0
    for path in made.folder.iterdir():
        os.utime(path, (when, when))
    assert diagnose(read_folder(made.folder)).culprits == {2}


def test_a_long_wait_that_is_looked_at_live() -> None:
    """The agent's stamps tell the true time, however long ago it began: no doubt is cast on that."""
    group = {"a": tuple(range(8))}
    over = {rank: [Call(1, "a", "all_reduce", 1, done=True, created_s=1.0)] for rank in range(8)}
    late = {rank: [*calls, Call(2, "a", "all_reduce", 2, created_s=2.0)] for rank, calls in over.items() if rank < 5}
    ranks = {rank: RankCalls(rank, calls, group, written_s=7200.0) for rank, calls in {**over, **late}.items()}
    assert diagnose(Calls(ranks, world=tuple(range(8)))).culprits == {5, 6, 7}
    copies = {rank: replace(one, copied=True) for rank, one in ranks.items()}
    assert diagnose(Calls(copies, world=tuple(range(8)))).culprits == set()


def test_a_copy_where_others_are_at_work_too(dumps: Make) -> None:
    """Rank 3 is late in one group; rank 1 of another is done with all that it called, and nobody waits for it."""
    made = dumps(**{"0": ALL, "a": (0, 1), "b": (2, 3)})
    _history(made)
    made.call((0, 1), "a", done=True)
    made.call((2,), "b", at=1.0)
    found = made.diagnosis()
    assert (found.culprits, 3 in found.suspects) == (set(), True)


def test_a_copy_where_a_stage_is_at_work(dumps: Make) -> None:
    """Many wait for what a whole group of ranks will send: that is how a pipeline works."""
    made = dumps(**{"0": range(8), **{f"p{rank}": (rank, rank + 4) for rank in range(4)}})
    made.call(range(8), "0", done=True)
    for rank in range(4):
        made.send(rank + 4, rank, f"p{rank}", here=(rank,))
    found = made.diagnosis()
    assert (found.culprits, found.suspects) == (set(), {4, 5, 6, 7})


def test_without_a_dump_and_nobody_waits(dumps: Make) -> None:
    """A dump that was not collected is no evidence of anything."""
    made = dumps(**{"0": ALL})
    _history(made)
    del made.of[2]
    found = made.diagnosis()
    assert found.suspects == set()
    assert "rank 2: there is no dump of it" in found.problems


@pytest.mark.parametrize("pending", [False, True])
def test_healthy(dumps: Make, pending: bool) -> None:
    """All done, or all in the same collective: nobody is to blame."""
    made = dumps(**{"0": ALL})
    _history(made)
    if pending:
        made.call(ALL, "0")
    assert made.diagnosis().culprits == set()


def test_dumps_of_different_moments(dumps: Make) -> None:
    """What one dump shows as under way the others are long done with: it was written before, and nothing hangs."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0,), "0", at=1.0)
    for number in range(3):
        made.call((1, 2, 3), "0", done=True, at=1.0 + number)
    assert made.diagnosis().culprits == set()
    made.call((1, 2, 3), "0", at=5.0)
    found = made.diagnosis()
    assert (found.culprits, found.suspects) == (set(), {0})
    assert any("older" in one for one in found.evidence[0])


def test_written_too_early_to_tell(dumps: Make) -> None:
    """A wait of half a second, by the time of the file, is none yet; the same dump an hour later is."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 1, 3), "0", at=1.0)
    folder, (when,) = made.write(), {entry["time_created_ns"] / 1e9 for entry in made.of[0]["entries"][-1:]}
    for later, culprits in ((0.5, set()), (3600.0, {2})):
        for path in folder.iterdir():
            os.utime(path, (when + later, when + later))
        found = diagnose(read_folder(folder))
        assert (found.culprits, found.suspects) == (culprits, {2})


def test_more_on_their_way_than_wait(dumps: Make) -> None:
    """One is a little ahead of the other three: a healthy job looks like that."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((2,), "0")
    assert made.diagnosis().culprits == set()


def test_given_up(dumps: Make) -> None:
    """After gloo's time-out nothing is under way any more. The one that never came is named where the files were
    written soon after the time-out; else it may only have been recorded a moment before the others."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 1, 3), "0", done=True, at=1.0, timeout_ms=5_000)
    folder, when = made.write(), made.of[0]["entries"][-1]["time_created_ns"] / 1e9
    for later, culprits in ((0.2, set()), (7.0, {2}), (10**7, set())):
        for path in folder.iterdir():
            os.utime(path, (when + later, when + later))
        found = diagnose(read_folder(folder))
        assert (found.culprits, found.suspects) == (culprits, {2}), later


def test_groups_that_share_a_name(dumps: Make) -> None:
    """Groups made by their members alone may have the same name as others: they are told apart by their members."""
    made = dumps(a=(0, 1), b=(2, 3))
    for _ in range(3):
        made.call((0, 1), "a", done=True)
    made.call((2, 3), "b", done=True)
    made.call((2,), "b")
    for rank in (2, 3):
        config = made.of[rank]["pg_config"]
        config["a"] = {**config.pop("b"), "name": "a"}
        for entry in made.of[rank]["entries"]:
            entry["process_group"] = ("a", "group_a")
    assert made.diagnosis().culprits == {3}


def test_other_names_of_files(dumps: Make) -> None:
    """The rank is what follows the word, else the number at the end."""
    made = dumps(**{"0": ALL})
    made.call(ALL, "0", done=True)
    made.call((0, 1, 3), "0")
    for rank, name in enumerate(("rank0_node7.pkl", "trace-rank-1", "_dump_2", "fr_3.json")):
        (made.write() / f"nccl_trace_rank_{rank}").rename(made.folder / name)
        for path in made.folder.glob("nccl_trace_rank_*"):
            path.unlink()
        made.of.pop(rank)
    assert diagnose(read_folder(made.folder)).culprits == {2}


def test_an_old_version_and_json(dumps: Make) -> None:
    """Fields that older versions name otherwise or lack, and the JSON form with its numbers as text."""
    made = dumps(**{"0": ALL})
    made.call(ALL, "0", done=True)
    made.call((0, 1, 3), "0")
    for dump in made.of.values():
        dump["version"] = "1.5"
        for entry in dump["entries"]:
            entry["seq_id"] = str(entry.pop("collective_seq_id"))
            for name in ("p2p_seq_id", "is_p2p", "retired", "time_created_ns", "frames", "timeout_ms"):
                entry.pop(name)
    assert diagnose(read_folder(made.write(as_json=True))).culprits == {2}


def test_a_slow_rank_is_no_culprit(dumps: Make) -> None:
    """One that is always last by half the time of a step is remarked upon, and not blamed."""
    made = dumps(**{"0": ALL})
    for number in range(30):
        made.call((0, 1, 3), "0", done=True, at=number * 0.1)
        made.call((2,), "0", done=True, at=number * 0.1 + 0.05)
    found = made.diagnosis()
    assert found.suspects == set()
    assert any("rank 2 is slow" in one for one in found.problems)


def test_an_even_job_has_no_slow_rank(dumps: Make) -> None:
    """Somebody is last each time, and never the same."""
    made = dumps(**{"0": ALL})
    for number in range(40):
        made.call(ALL, "0", done=True, at=number * 0.1)
        made.of[number % 4]["entries"][-1]["time_created_ns"] += 50_000_000
    assert made.diagnosis().problems == []


def test_a_moment_after_an_end(dumps: Make) -> None:
    """The dump of one that waits knows of an end that torch's watchdog, which looks ten times a second, has not seen:
    it waits for a moment only, whatever the files' times. Where the watchdog has seen all ends, the wait is real."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 1, 3), "0", at=1.0)
    assert made.diagnosis().culprits == {2}
    made.of[0]["entries"][-2]["retired"] = False
    found = made.diagnosis()
    assert (found.culprits, found.suspects) == (set(), {2})
    assert any("a moment before" in one for one in found.problems)


def test_a_moment_after_an_end_of_dumps_of_what_is_active(dumps: Make) -> None:
    """Where only what is under way was dumped, the watchdog's status tells: by it more is under way than the device
    says."""
    made = dumps(**{"0": ALL})
    _history(made)
    made.call((0, 1, 3), "0", at=1.0)
    for dump in made.of.values():
        dump["entries"] = [entry for entry in dump["entries"] if not entry["retired"]]
        entered = 5 + len(dump["entries"])
        dump["pg_status"] = {"0": {"last_enqueued_collective": entered, "last_completed_collective": 5}}
    assert made.diagnosis().culprits == {2}
    made.of[1]["pg_status"]["0"]["last_completed_collective"] = 4
    assert made.diagnosis().culprits == set()


def test_the_first_collective_of_a_job(dumps: Make) -> None:
    """The watchdog's status counts from -1; that nothing has ended yet is no end that it missed."""
    made = dumps(**{"0": ALL})
    made.call((0, 1, 3), "0", at=1.0)
    made.of[2]["entries"] = []
    for rank, dump in made.of.items():
        entered = 1 if rank != 2 else -1
        dump["pg_status"] = {"0": {"last_enqueued_collective": entered, "last_completed_collective": -1}}
    assert made.diagnosis().suspects == {2}
