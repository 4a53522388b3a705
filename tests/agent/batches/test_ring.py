"""Tests which batch a model was given, as the identity of the tensors shows it."""

from __future__ import annotations

from typing import Any, Callable

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def ring(agent_module: Callable[[str], Any]) -> Any:
    return agent_module("agent.batches.batch_ring").BatchRing()


@pytest.fixture
def receive(agent_module: Callable[[str], Any], ring: Any) -> Callable[..., Any]:
    """Lets the loop receive a batch of these tensors, and returns what is remembered of it."""
    digests = agent_module("agent.batches.sample_digests")

    def received(*tensors: Any) -> Any:
        batch = digests.digest(digests.look(list(tensors)))
        ring.receive(batch, 0)
        return batch

    return received


def test_the_batch_of_these_objects(ring: Any, receive: Callable[..., Any]) -> None:
    """Each batch is known by any of its own tensors."""
    (a, b), (c, d) = [(torch.rand(4, 8), torch.rand(4)) for _ in range(2)]
    first, second = receive(a, b), receive(c, d)
    assert [ring.owner(given) for given in ([a], [a, b], [d], [d, c])] == [first, first, second, second]


def test_other_objects(ring: Any, receive: Callable[..., Any]) -> None:
    """A copy, a slice, something that is no tensor, and tensors of two batches are for `match` to compare."""
    (a, b), (c, d) = [(torch.rand(4, 8), torch.rand(4)) for _ in range(2)]
    receive(a, b), receive(c, d)
    for given in ([a.clone()], [a[:]], [a, True], [a, c], []):
        assert ring.owner(given) is None


def test_changed_in_place(ring: Any, receive: Callable[..., Any]) -> None:
    """The tensor of a batch into which a job copies others, batch by batch, is none of that batch any more."""
    buffer, a = torch.rand(4, 8), torch.rand(4, 8)
    receive(buffer), receive(a)
    buffer.copy_(a)
    assert ring.owner([buffer]) is None
    with torch.inference_mode():
        unseen = torch.rand(4, 8)  # torch does not count the changes of such tensors
    receive(unseen)
    assert ring.owner([unseen]) is None


def test_batch_that_was_trained_on(ring: Any, receive: Callable[..., Any]) -> None:
    """It is not taken for a batch that is due; when it is received again, it is."""
    a = torch.rand(4, 8)
    ring.use(receive(a))
    assert ring.owner([a]) is None
    again = receive(a)
    assert ring.owner([a]) is again


def test_one_object_in_two_batches(ring: Any, receive: Callable[..., Any]) -> None:
    """A mask that a loader gives out with each batch tells none of them apart; the other tensors do, without it."""
    mask, a, b = torch.ones(4, 4), torch.rand(4, 8), torch.rand(4, 8)
    receive(a, mask)
    second = receive(b, mask)
    assert ring.owner([b]) is second
    assert ring.owner([mask]) is None
    assert ring.owner([b, mask]) is None


def test_batches_that_a_thread_fetches(ring: Any, receive: Callable[..., Any]) -> None:
    """While a thread of the job's own has batches, contents are compared: the loop may hold any of them."""
    a = torch.rand(4, 8)
    ring.fetch(receive(a))
    assert ring.owner([a]) is None


def test_old_batches_are_forgotten(ring: Any, receive: Callable[..., Any]) -> None:
    """What is remembered does not grow with the number of batches."""
    tensors = [torch.rand(2, 2) for _ in range(300)]
    for tensor in tensors:
        receive(tensor)
    assert ring.owner([tensors[0]]) is None
    assert len(ring._tensors) == 256
