"""Collectives in the wrong place: the rank that is blamed, if the members of the group alone do not show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchaos.harness.monitoring.diagnosis.blame import diagnose
from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder

ALL = (0, 1, 2, 3)
Make = Callable[..., Any]


def _history(made: Any, groups: Mapping[str, tuple[int, ...]], description: str) -> None:
    for name, ranks in groups.items():
        made.call(ranks, name, done=True, process_group=(name, description))


def test_one_against_one_by_what_other_pairs_call(dumps: Make) -> None:
    """Two ranks call different operations; the other pairs of that kind tell which of them is wrong. Pairs of another
    kind tell nothing."""
    pairs = {"1": (0, 1), "2": (2, 3), "3": (4, 5)}
    for description, culprits in (("data", {1}), ("", set())):
        made = dumps(**pairs)
        _history(made, pairs, description)
        more = {"process_group": ("1", description)}
        made.call((0,), "1", "all_reduce", **more)
        made.call((1,), "1", "broadcast", **more)
        for name in ("2", "3"):
            made.call(pairs[name], name, done=True, process_group=(name, description))
        found = made.diagnosis()
        assert (found.culprits, found.suspects) == (culprits, culprits or {0, 1})


def test_a_mismatch_is_seen_though_a_dump_is_missing(dumps: Make) -> None:
    """A fourth rank of which nothing is known does not hide that one of the three gives another size."""
    made = dumps(**{"0": ALL})
    made.call(ALL, "0", done=True)
    made.call((0, 1), "0")
    made.call((2,), "0", size=9)
    del made.of[3]
    assert made.diagnosis().culprits == {2}


def test_both_are_called_in_another_order(dumps: Make) -> None:
    """All are in both, and one came to them the other way round: no rank is missing anywhere."""
    made = dumps(a=ALL, b=ALL)
    made.call((0, 1, 3), "a")
    made.call((0, 1, 3), "b")
    made.call((2,), "b")
    made.call((2,), "a")
    found = made.diagnosis()
    assert (found.culprits, found.confidence) == ({2}, "high")
    assert "the other way round" in found.evidence[2][0]


def test_one_that_left_a_call_out(dumps: Make) -> None:
    """Rank 1 left out a call of its pair and waits for all, who wait for rank 0, which waits for it: it alone is in the
    circle."""
    made = dumps(a=(0, 1), **{"0": ALL})
    made.call((0, 1), "a", done=True)
    made.call(ALL, "0", done=True)
    made.call((0,), "a")
    made.call((0,), "0")
    made.call((1, 2, 3), "0")
    assert made.diagnosis().culprits == {1}


def test_who_is_out_of_turn(dumps: Make) -> None:
    """Rank 1 comes to the collective of all before that of its pair. Seven wait for rank 0, one for rank 1; but by the
    number of its calls it is rank 1 that is out of turn."""
    pairs = {str(number + 1): (2 * number, 2 * number + 1) for number in range(4)}
    made = dumps(**{"0": tuple(range(8))}, **pairs)
    for name, ranks in pairs.items():
        made.call(ranks, name, done=True)
    made.call(range(8), "0", done=True)
    for name in ("2", "3", "4"):
        made.call(pairs[name], name, done=True)
    made.call((0,), "1")
    made.call(range(1, 8), "0")
    assert made.diagnosis().culprits == {1}


def test_a_torn_dump_is_no_proof(dumps: Make) -> None:
    """Of a torn dump the last calls are missing: where another explains the wait, its rank is only a suspect."""
    made = dumps(**{"0": ALL})
    for number in range(5):
        made.call(ALL, "0", done=True, at=number * 0.1)
    made.call((0, 3), "0", at=1.0)
    folder = made.write()
    path = folder / "nccl_trace_rank_1"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = diagnose(read_folder(folder))
    assert (found.culprits, found.suspects) == ({2}, {1, 2})
