"""The order of operations of different ranks, from the stamps of collectives."""

from __future__ import annotations

from dataclasses import replace

from torchaos.harness.crash_explorer.operations import Operation, OperationKind, order, with_steps
from torchaos.harness.protocol.collective_stamps import Stamp
from torchaos.harness.protocol.wire import Event
from torchaos.harness.protocol.wire import Kind as Happened


def _stamp(rank: int, seq: int, at: float, thread: int = 0, group: str = "0", number: int | None = None) -> Stamp:
    return Stamp(
        rank, 0, 100 + rank, number or seq, seq, "barrier", group, (0, 1), 4, 1, at, at + 0.1, None, thread
    )  # fmt: skip


def _done(number: int, rank: int | None, at: float, tid: int | None = None) -> Operation:
    pid = 99 if rank is None else 100 + rank
    return Operation(number, OperationKind.UNLINK, f"{number}", rank, pid, tid or pid, begun_s=at, ended_s=at + 0.5)


def test_a_collective_orders_what_comes_before_and_after_it() -> None:
    """What a rank did before a collective comes before what another does after it, whoever is first in time."""
    operations = [_done(0, 0, 1), _done(1, 1, 2), _done(2, 1, 5), _done(3, 0, 6)]
    stamps = [_stamp(0, 1, 3), _stamp(1, 1, 4)]
    assert order(operations, stamps) == (frozenset({(0, 2), (1, 3)}), ())


def test_a_message_orders_what_the_sender_did_before_it_and_the_receiver_after_it() -> None:
    """The other way round, nobody waits: the sender may go on before the receiver has begun."""
    operations = [_done(0, 0, 1), _done(1, 1, 2), _done(2, 1, 5), _done(3, 0, 6)]
    stamps = [replace(_stamp(0, 1, 3), op="send"), replace(_stamp(1, 1, 4), op="recv")]
    assert order(operations, stamps) == (frozenset({(0, 2)}), ())


def test_an_operation_during_the_begin_is_not_before_it() -> None:
    """An operation that was not over when its rank began the collective is not ordered by it."""
    operations = [_done(0, 0, 2.9), _done(1, 1, 5)]
    assert order(operations, [_stamp(0, 1, 3), _stamp(1, 1, 4)]) == (frozenset(), ())


def test_an_asynchronous_collective_orders_nothing_against_what_was_seen() -> None:
    """A rank that goes on before the others have begun is not put behind them."""
    operations = [_done(0, 0, 3.5), _done(1, 1, 5)]
    assert order(operations, [_stamp(0, 1, 3), _stamp(1, 1, 6)]) == (frozenset(), ())


def test_a_save_in_the_background_is_ordered_by_its_own_collectives() -> None:
    """While a thread with collectives of its own saves, those of training don't order its operations."""
    operations = [_done(0, 0, 2, tid=7), _done(1, 1, 6, tid=8), _done(2, 1, 9, tid=8)]
    training = [_stamp(0, 1, 4, number=2), _stamp(1, 1, 5, number=2)]
    own = [
        _stamp(0, 1, 1, 7, "s", 1), _stamp(1, 1, 1, 8, "s", 1), _stamp(0, 2, 8, 7, "s", 3), _stamp(1, 2, 8, 8, "s", 3),
    ]  # fmt: skip
    assert order(operations, training + own) == (frozenset({(0, 2)}), ())
    main = [Operation(**{**vars(operation), "tid": operation.pid}) for operation in operations]
    assert order(main, training + own) == (frozenset({(0, 1), (0, 2)}), ())


def test_what_is_not_known_stays_in_the_order_that_was_seen() -> None:
    """A rank without stamps, a process of no rank, and a rank some of whose stamps are missing stay where they were
    seen; the others are ordered by collectives."""
    operations = [_done(0, 0, 1), _done(1, None, 2), _done(2, 1, 3), _done(3, 0, 4)]
    stamps = [_stamp(0, 1, 9), _stamp(1, 1, 9)]
    pairs, unsure = order(operations, stamps)
    assert pairs == {(0, 1), (1, 2), (1, 3)}
    assert [sentence.split(" writes")[0] for sentence in unsure] == ["a process of no rank"]
    pairs, unsure = order(operations, [_stamp(0, 1, 9), _stamp(1, 1, 9), _stamp(1, 3, 10)])
    assert pairs == {(0, 1), (1, 2), (1, 3), (0, 2), (2, 3)}
    assert len(unsure) == 2


def test_one_rank_needs_no_stamps() -> None:
    """If only one rank writes, there is one order."""
    assert order([_done(0, 0, 1), _done(1, 0, 2)], []) == (frozenset(), ())


def test_steps_and_phases() -> None:
    """An operation is in the step after the last one of its rank, and in a save if its rank saves then."""

    def event(kind: Happened, at: float, step: int | None = None, rank: int = 0) -> Event:
        return Event(kind, "rank", 0, 0.0, at, rank, 0, step, {})

    events = [event(Happened.AGENT_STARTED, 0), event(Happened.STEP, 1, 1), event(Happened.STEP, 2, 2)]
    events += [event(Happened.SAVE_BEGIN, 2.5, 3), event(Happened.SAVE_END, 4, 3), event(Happened.STEP, 5, 3)]
    operations = [_done(n, rank, at) for n, (rank, at) in enumerate([(0, 0.5), (0, 1.5), (0, 3), (0, 5.5), (1, 3)])]
    found = [(operation.step, operation.phase) for operation in with_steps(operations, events)]
    assert found == [(1, None), (2, None), (3, "checkpoint_write"), (4, None), (None, None)]
