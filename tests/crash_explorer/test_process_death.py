"""Death of all processes: every consistent cut of the ranks' operations, in classes of equal files."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from saves import Disk, contents, play, table

from torchaos.harness.crash_explorer import crash_points, state_selection
from torchaos.harness.crash_explorer.crash_points import CrashPoints
from torchaos.harness.crash_explorer.folder_contents import Blobs
from torchaos.harness.crash_explorer.fs_model import FilesystemModel
from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.state_selection import chosen


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def _all_cuts(recording: Recording) -> list[dict[int | None, int]]:
    """Each consistent cut, found by trying all of them."""
    fs, lines = FilesystemModel(recording), recording.lines
    before = set(recording.before) | {(a, e.operation.number) for e in fs.effects for a in e.needs}
    operations = recording.operations
    found = []
    for counts in itertools.product(*(range(len(line) + 1) for line in lines.values())):
        cut = dict(zip(lines, counts, strict=True))
        if all(fs.has(cut, operations[a]) or not fs.has(cut, operations[b]) for a, b in before):
            found.append(cut)
    return found


def _random(blobs: Blobs, seed: int) -> Recording:
    """Three ranks that save files of their own, rename and remove them, and wait for each other now and then."""
    draw, disk = random.Random(seed), Disk(blobs)
    disk.rank(0).mkdir("d")
    disk.barrier(0, 1, 2)
    mine: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for number in range(draw.randint(5, 9)):
        rank, name = draw.randrange(3), f"d/{number}"
        act = draw.choice(["save", "save", "again", "rename", "unlink", "barrier"])
        if act == "barrier":
            disk.barrier(*draw.sample(range(3), 2))
        elif act == "save" or not mine[rank]:
            disk.rank(rank).save(name, b"%d" % number)
            mine[rank].append(name)
        else:
            old = mine[rank].pop(draw.randrange(len(mine[rank])))
            if act == "again":
                disk.rank(rank).save(old, b"again%d" % number)
                mine[rank].append(old)
            elif act == "rename":
                disk.rank(rank).rename(old, name)
                mine[rank].append(name)
            else:
                disk.rank(rank).unlink(old)
    return disk.recording()


@pytest.mark.parametrize("seed", range(20))
def test_each_moment_is_in_a_class(blobs: Blobs, tmp_path: Path, seed: int) -> None:
    """The classes are the trees of all consistent cuts, no more and no fewer; their number of moments is the number of
    cuts; and the trees of the recorded run are those that a real folder had."""
    recording = _random(blobs, seed)
    points = CrashPoints(recording, symmetry=False)
    tried = {state.digest for state in state_selection.process_death_states(points)}
    everything = _all_cuts(recording)
    torn = {moment.positions for moment in points.classes if points.cut(moment.positions)[1]}
    assert not torn
    assert tried == {points.fs.tree(cut).digest for cut in everything}
    assert points.moments == len(everything)
    for number, (stands, since, until) in enumerate(points.seen()):
        assert (since, until) == (number, number + 1)
        play(recording.operations[:number], blobs, tmp_path / f"{number}")
        blobs.make_tree(points.fs.tree(points.cut(stands)[0]), tmp_path / f"{number}-again")
        assert contents(tmp_path / f"{number}-again") == contents(tmp_path / f"{number}")


def test_the_times_of_the_run_are_all_there(blobs: Blobs) -> None:
    """Each moment of the recorded run is in one state, and the states that were never seen have no time."""
    recording = table(blobs, 2)
    states = list(state_selection.process_death_states(CrashPoints(recording)))
    times = sorted(times for state in states for times in state.moments)
    assert times[0][0] == 0
    assert times[-1][1] == recording.ended_s
    assert all(one[1] == other[0] for one, other in itertools.pairwise(times))
    assert any(not state.moments for state in states)


@pytest.mark.parametrize(("ranks", "points", "classes"), [(2, 53, 19), (4, 2405, 83), (8, 5_764_805, 483)])
def test_a_sharded_save_by_few_classes(blobs: Blobs, ranks: int, points: int, classes: int) -> None:
    """The moments of a save by 8 ranks are millions, and the classes of files that they leave fewer than 500: each
    shard is not there, empty, torn or whole, and ranks 1 to 7 are equal."""
    found = CrashPoints(table(blobs, ranks))
    assert found.moments == points
    assert len(found.classes) == classes
    assert not found.drawn


def test_the_table_without_symmetry(blobs: Blobs) -> None:
    """Without symmetry of ranks there are as many states as combinations of the states of each shard, and three more
    of the marker."""
    assert [len(CrashPoints(table(blobs, ranks), symmetry=False).classes) for ranks in (2, 4)] == [4**2 + 3, 4**4 + 3]


def test_no_state_without_what_it_needs(blobs: Blobs) -> None:
    """The marker comes after a barrier, so it is in no state in which a shard is missing or torn."""
    for state in state_selection.process_death_states(CrashPoints(table(blobs, 3))):
        if "marker.tmp" in state.tree.files or "marker" in state.tree.files:
            assert [state.tree.files[f"shard-{rank}"].size for rank in range(3)] == [30, 30, 30]


def test_what_cannot_be_is_not_tried(blobs: Blobs) -> None:
    """Without any barrier, a rank still can't create a file in a folder that another has not made, and the folder is
    renamed with that file in it. But it may be renamed before the file is written: that needs no name."""
    disk = Disk(blobs)
    disk.rank(0).mkdir("tmp")
    disk.rank(1).save("tmp/a", b"a")
    disk.rank(0).rename("tmp", "final")
    states = state_selection.process_death_states(CrashPoints(disk.recording()))
    trees = [{**{path: c.size for path, c in s.tree.files.items()}, **dict.fromkeys(s.tree.folders)} for s in states]
    tmp, final = {"tmp": None}, {"final": None}
    expected = [{}, tmp, {**tmp, "tmp/a": 0}, {**tmp, "tmp/a": 1}, {**final, "final/a": 0}, {**final, "final/a": 1}]
    assert len(trees) == len(expected)
    assert all(tree in trees for tree in expected)


def test_a_large_write_may_be_torn(blobs: Blobs) -> None:
    """A write of more than a page may be done in part; a small one is there or not."""
    disk = Disk(blobs)
    disk.rank(0).save("large", b"x" * 10_000)
    disk.rank(0).save("small", b"x" * 100)
    sizes = [
        {path: c.size for path, c in s.tree.files.items()}
        for s in state_selection.process_death_states(CrashPoints(disk.recording()))
    ]
    large = {"large": 10_000}
    assert sizes == [{}, {"large": 0}, {"large": 4096}, large, {**large, "small": 0}, {**large, "small": 100}]


def test_a_file_is_overwritten_in_place(blobs: Blobs) -> None:
    """A file that is saved again under its name is empty for a while, and its first content is gone."""
    disk = Disk(blobs)
    disk.rank(0).save("last", b"one")
    disk.rank(0).save("last", b"two")
    recording = disk.recording()
    states = list(state_selection.process_death_states(CrashPoints(recording)))
    assert [[blobs.read(c) for c in s.tree.files.values()] for s in states] == [[], [b""], [b"one"], [b"two"]]
    assert recording.kept_as_made == frozenset()
    assert [state.linked for state in states] == [frozenset()] * 4
    assert [state.moments for state in states] == [((0, 1),), ((1, 2), (5, 6)), ((2, 5),), ((6, 8),)]


def test_ranks_that_differ_are_kept_apart(blobs: Blobs) -> None:
    """Ranks are equal only if they do the same: not if one of them writes a file more, nor if others wait for one."""

    def groups(more: bool, waits: bool) -> int:
        disk = Disk(blobs)
        for rank in (1, 2, 3):
            disk.rank(rank).save(f"shard-{rank}", b"x")
            if rank == 3 and more:
                disk.rank(rank).save("rng", b"x")
        if waits:
            disk.barrier(1, 0)
        disk.rank(0).save("marker", b"x")
        return len(CrashPoints(disk.recording()).classes)

    assert groups(more=False, waits=False) == 3 * math.comb(5, 3)  # of the marker, and of 3 equal shards in 3 states
    assert groups(more=True, waits=False) == 3 * math.comb(4, 2) * 5
    assert groups(more=False, waits=True) == 3 * math.comb(4, 2) + 2 * math.comb(4, 2)


def test_a_job_that_writes_without_a_break(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks write a file again and again, and could die in very many combinations: a bounded number is built, half
    of them moments that the run had, and the sentence says that there may be more."""
    monkeypatch.setattr(crash_points, "COMBINATIONS", 20_000)
    monkeypatch.setattr(crash_points, "WORK", 0)
    disk = Disk(blobs)
    for number in range(200):
        for rank in (0, 1):
            disk.rank(rank).save(f"beat-{rank}", b"%d" % number)
    recording = disk.recording()
    found = CrashPoints(recording)
    assert found.drawn
    assert 250 <= len(found.classes) <= crash_points.most_of(recording) == 500
    assert sum(bool(moment.seen) for moment in found.classes) >= 250
    for model in ("process-death", "power-loss-ext4-ordered"):
        choice = chosen(recording, [model], {}, 10, 0)
        assert len(choice.states) == 10
        assert "There may be more: the run made 1598 operations" in choice.in_words


def test_a_long_run(blobs: Blobs) -> None:
    """Of a thousand operations by one rank, every moment of a death of processes is examined, and nothing is said about
    more states. Losses of power are not examined at every moment, and the sentence says so."""
    disk = Disk(blobs)
    for number in range(301):
        disk.rank(0).save("beat", b"%d" % number)
    recording = disk.recording()
    assert len(recording.operations) > 1000
    assert "There may be more" not in chosen(recording, ["process-death"], {}, 10, 0).in_words
    assert "There may be more" in chosen(recording, ["power-loss-nfs-close-to-open"], {}, 10, 0).in_words


def _into_one_folder(blobs: Blobs, maker: int, owner: bool = False, saves: int = 1) -> Recording:
    """Saves by ranks 1 to 4 into a folder, which the rank that comes first makes. With `owner`, it writes its name."""
    disk = Disk(blobs)
    for number in range(saves):
        disk.rank(maker).mkdir(f"d{number}")
        if owner:
            disk.rank(maker).save(f"d{number}/owner", b"%d" % maker)
        for rank in (1, 2, 3, 4):
            disk.rank(rank).save(f"d{number}/shard-{rank}", b"x")
        disk.barrier(1, 2, 3, 4)
        maker = maker % 4 + 1
    return disk.recording()


def test_it_does_not_matter_which_rank_makes_the_folder(blobs: Blobs) -> None:
    """Four ranks save into one folder, and the first of them makes it: no folder, or 4 equal shards in 3 states. In the
    next save another rank makes the folder, and the ranks are still equal."""
    one = math.comb(6, 2)
    assert len(CrashPoints(_into_one_folder(blobs, maker=1)).classes) == 1 + one
    assert len(CrashPoints(_into_one_folder(blobs, maker=3)).classes) == 1 + one
    assert len(CrashPoints(_into_one_folder(blobs, maker=3, saves=2)).classes) == 1 + 2 * one
    found = CrashPoints(_into_one_folder(blobs, maker=3), symmetry=False)
    assert len(found.classes) == 1 + 3**4
    assert found.moments == len(_all_cuts(found.recording))


def test_a_folder_that_shows_who_made_it(blobs: Blobs) -> None:
    """If the rank that makes the folder also writes its name into it, a resume can tell who it was. So this rank is not
    equal to the others: its shard may be missing, empty or whole with each combination of the other three."""
    recording = _into_one_folder(blobs, maker=3, owner=True)
    others = math.comb(5, 2)
    assert (
        len(CrashPoints(recording).classes) == 1 + (3 + 2) * others
    )  # owner: missing, empty, whole; then the shard: 2 more
    trees = {state.digest for state in state_selection.process_death_states(CrashPoints(recording))}
    told = {
        (len(state.tree.files), state.tree.files["d0/owner"].size, "d0/shard-3" in state.tree.files)
        for state in state_selection.process_death_states(CrashPoints(recording))
        if "d0/owner" in state.tree.files
    }
    assert len(trees) == 1 + 5 * others
    assert {(2, 1, True), (2, 1, False), (2, 0, False)} <= told
