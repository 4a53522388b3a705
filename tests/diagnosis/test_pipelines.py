"""What the stamps of sends and recvs say of a pipeline that stands still."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchaos.harness.monitoring.diagnosis.blame import diagnose
from torchaos.harness.monitoring.diagnosis.wait_graph import of_stamps
from torchaos.harness.protocol.collective_stamps import Stamp, channel

SENT, TOOK = 10.0, 10.1


def _stamps(rank: int, calls: Sequence[tuple[str, int, int]], open_: int = 0, first: int = 1) -> list[Stamp]:
    """The calls of a rank (operation, other rank, number), of which the last `open_` are under way. `first`: the number
    of the first, if older ones are not recorded any more."""
    found = []
    for number, (op, other, seq) in enumerate(calls, start=first):
        source, target = (rank, other) if op == "send" else (other, rank)
        group, ranks = ("0", (0, 1, 2)) if op == "all_reduce" else (channel("0", source, target), (source, target))
        ended = None if number >= first + len(calls) - open_ else TOOK
        found.append(Stamp(rank, 0, 100 + rank, number, seq, op, group, ranks, 64, 5, SENT, TOOK, ended))
    return found


@pytest.mark.parametrize("first", [1, 300])
def test_the_stage_that_has_not_sent_is_to_blame(first: int) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0, which has sent nothing since the last time; also when the first
    calls are no longer in the ring."""
    by_rank = [
        _stamps(0, [("send", 1, 7), ("recv", 1, 7)], 0, first),
        _stamps(1, [("recv", 0, 7), ("send", 2, 7), ("recv", 0, 8)], 1, first),
        _stamps(2, [("recv", 1, 7), ("recv", 1, 8)], 1, first),
    ]
    found = diagnose(of_stamps(by_rank, 60.0))
    assert tuple(found.culprits) == (0,), found


def test_a_message_under_way_blames_nobody_for_not_sending() -> None:
    """Rank 0 has sent it and has gone on; that rank 1 still waits for it is not the fault of rank 0's program."""
    by_rank = [
        _stamps(0, [("send", 1, 7), ("send", 1, 8), ("recv", 1, 8)], 1, 300),
        _stamps(1, [("recv", 0, 7), ("send", 0, 7), ("recv", 0, 8)], 1, 300),
    ]
    assert 0 not in diagnose(of_stamps(by_rank, 60.0)).culprits


def test_the_stage_that_does_not_give_the_gradient_back_is_to_blame() -> None:
    """It has taken what was sent, and rank 0 waits for its answer."""
    by_rank = [
        _stamps(0, [("send", 1, 8), ("recv", 1, 8)], 1, 300),
        _stamps(1, [("recv", 0, 8)], 0, 300),
    ]
    assert tuple(diagnose(of_stamps(by_rank, 60.0)).culprits) == (1,)
