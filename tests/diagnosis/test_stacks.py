"""Finds the ranks whose stacks differ. Pure."""

from __future__ import annotations

import json

import pytest

from torchaos.harness.interfaces import RankProcess
from torchaos.harness.monitoring.diagnosis.live_job import Frame, Stack, on_one_node, outliers, parse

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/"
LIBRARY = "/usr/lib/python3.11/"


def _stack(*frames: tuple[str, str]) -> Stack:
    return Stack(1, tuple(Frame(function, file, 7) for function, file in frames))


WAITS = _stack(("all_reduce", TORCH + "distributed/distributed_c10d.py"), ("main", "/job/train.py"))
BACKWARD = _stack(("_engine_run_backward", TORCH + "autograd/graph.py"), ("main", "/job/train.py"))
LOCKED = _stack(("acquire", LIBRARY + "threading.py"), ("load", "/job/data.py"), ("main", "/job/train.py"))
ITEM = _stack(("main", "/job/train.py"))


def test_whoever_waits_in_no_collective() -> None:
    """The ones that wait hold nobody up; the place named is the user's own code, not the library's."""
    found = outliers({0: WAITS, 1: LOCKED, 2: BACKWARD})
    assert list(found) == [1]
    assert "load (/job/data.py:7)" in found[1]


def test_two_ranks() -> None:
    """There is no majority of two, and none is needed."""
    assert list(outliers({0: LOCKED, 1: WAITS})) == [0]


def test_ranks_that_wait_for_a_gpu() -> None:
    """Nobody is seen in a collective: the one that is elsewhere than most."""
    assert list(outliers({0: ITEM, 1: ITEM, 2: LOCKED, 3: ITEM})) == [2]


def test_stages_of_a_pipeline() -> None:
    """Stages do different things; within one of them somebody stands out."""
    other = _stack(("second_stage", "/job/train.py"))
    stacks = {0: ITEM, 1: ITEM, 2: LOCKED, 3: other, 4: other, 5: other}
    assert outliers(stacks) == {}
    assert list(outliers(stacks, [(0, 3), (0, 1, 2), (3, 4, 5)])) == [2]


def test_nobody_stands_out() -> None:
    """All the same, or one against one outside of any collective."""
    assert outliers({0: WAITS, 1: WAITS}) == outliers({0: ITEM, 1: LOCKED}) == outliers({}) == {}


@pytest.mark.parametrize(
    ("blamed", "words"),
    [
        ({2, 3}, ["ranks 2, 3 are all ranks of node 1, and no rank of another node is to blame"]),
        ({4, 5}, ["ranks 4, 5 are 2 of the 3 ranks of node 2, and no rank of another node is to blame"]),
        ({2}, []), ({1, 2}, []), ({2, 9}, []), (set(), []),
    ],
)  # fmt: skip
def test_ranks_of_one_node_are_told_as_such(blamed: set[int], words: list[str]) -> None:
    """Several ranks of one machine that differ from all others, as if the machine were the cause. One rank shows
    nothing of its machine, nor do ranks of two machines, a rank whose machine is not known, or a job on one machine."""
    ranks = {rank: RankProcess(rank, 0, min(rank // 2, 2), 100 + rank, 1, 0, 7) for rank in range(7)}
    assert on_one_node(blamed, ranks) == words
    assert on_one_node(blamed, {rank: one for rank, one in ranks.items() if one.node == 1}) == []


def test_py_spy_output() -> None:
    """The main thread counts, whatever comes before it; what is no such output gives nothing."""
    frame = {"name": "main", "filename": "/job/train.py", "line": 3}
    threads = [{"thread_name": "Thread-1", "frames": []}, {"thread_name": "MainThread", "frames": [frame]}]
    found = parse(5, json.dumps(threads))
    assert found == Stack(5, (Frame("main", "/job/train.py", 3),))
    for text in ("", "[]", "{}", "[1]", '[{"thread_name": "MainThread"}]'):
        assert parse(5, text) is None
