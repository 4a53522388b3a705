"""The processes that are taken for ranks, in process trees made by hand."""

from __future__ import annotations

from torchaos.harness.monitoring.probes.process_tree import Claims, Identity, Member, find_ranks

LATER_S = 100.0


class Tree:
    """Processes by pid; identities are those of torchelastic's environment."""

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}

    def add(
        self, pid: int, parent: int | None, rank: int | None = None, *, attempt: int = 0, python: bool = True
    ) -> Member:  # fmt: skip
        identity = None if rank is None else Identity(rank, rank, 2, 0, attempt)
        above = None if parent is None else self.members[parent]
        self.members[pid] = Member(pid, pid, above, 0.0, identity, python)
        return self.members[pid]

    def ranks(self, *with_agent: int, now_s: float = LATER_S) -> dict[tuple[int, int], int]:
        return {key: member.pid for key, member in find_ranks(self.members, with_agent, now_s).ranks.items()}


def two_ranks() -> Tree:
    tree = Tree()
    tree.add(10, None)
    tree.add(20, 10, 0)
    tree.add(21, 10, 1)
    return tree


def test_the_workers_of_torchrun_are_the_ranks() -> None:
    """Children of the agent with torchelastic's environment are ranks, and their parent is the agent of the node."""
    tree = two_ranks()
    assert tree.ranks() == {(0, 0): 20, (0, 1): 21}
    assert {node: one.pid for node, one in find_ranks(tree.members, (), LATER_S).agents.items()} == {0: 10}


def test_data_loader_workers_are_no_ranks() -> None:
    """Children of a rank share its environment and are never taken, not even when the rank is gone."""
    tree = two_ranks()
    tree.add(30, 21, 1)
    tree.add(31, 30, 1)
    assert tree.ranks() == {(0, 0): 20, (0, 1): 21}
    tree.members.pop(21).alive = False
    assert tree.ranks() == {(0, 0): 20}


def test_an_orphan_of_unknown_descent_is_no_rank() -> None:
    """A process with a rank's environment whose parent was never seen may be a data-loader worker."""
    tree = two_ranks()
    tree.add(40, None, 1)
    assert tree.ranks() == {(0, 0): 20, (0, 1): 21}


def test_below_a_wrapper_the_trainer_is_the_rank() -> None:
    """A shell that torchrun started is passed over for the one Python below it; its helpers don't count."""
    tree = Tree()
    tree.add(10, None)
    tree.add(20, 10, 0, python=False)
    assert tree.ranks(now_s=1.0) == {}
    tree.add(21, 20, 0, python=False)
    tree.add(22, 21, 0)
    tree.add(23, 22, 0)
    assert tree.ranks() == {(0, 0): 22}


def test_a_wrapper_without_python_is_the_rank_after_a_while() -> None:
    """A trainer in another language is the process that torchrun started."""
    tree = Tree()
    tree.add(10, None)
    tree.add(20, 10, 0, python=False)
    assert tree.ranks() == {(0, 0): 20}


def test_two_candidates_are_refused_unless_our_agent_knows() -> None:
    """With two Pythons below a wrapper the rank is unknown, until one of them says that it is the trainer."""
    tree = Tree()
    tree.add(10, None)
    tree.add(20, 10, 0, python=False)
    tree.add(21, 20, 0)
    tree.add(22, 20, 0)
    found = find_ranks(tree.members, (), LATER_S)
    assert (found.ranks, found.ambiguous) == ({}, {(0, 0): (21, 22)})
    assert tree.ranks(22) == {(0, 0): 22}


def test_two_jobs_with_one_rank_number_are_refused() -> None:
    """Two agents below one command, each with a rank 0: neither is taken."""
    tree = two_ranks()
    tree.add(11, None)
    tree.add(50, 11, 0)
    found = find_ranks(tree.members, (), LATER_S)
    assert found.ambiguous == {(0, 0): (20, 50)}
    assert set(found.ranks) == {(0, 1)}


def test_a_nested_launch_is_no_rank() -> None:
    """What a rank launches in turn, with an environment of its own, lies below a rank."""
    tree = two_ranks()
    tree.add(60, 20)
    tree.add(61, 60, 1)
    assert tree.ranks() == {(0, 0): 20, (0, 1): 21}


def test_claims_that_proc_bears_out_are_silent() -> None:
    """What torchelastic and the agent say of a rank is compared with its environment; agreement is not told."""
    claims, tree = Claims(), two_ranks()
    claims.add("torchelastic", 20, (0, 0))
    assert claims.differences(tree.members, float("inf")) == []


def test_claims_that_differ_are_told_once() -> None:
    """A pid that is another rank, one that has no rank, and one that is not there are each named once."""
    claims, tree = Claims(), two_ranks()
    claims.add("torchelastic", 20, (0, 1))
    claims.add("the agent", 10, (0, 0))
    claims.add("torchelastic", 99, (1, 0))
    told = claims.differences(tree.members, float("inf"))
    assert [text.partition("; ")[2][:22] for text in told] == [
        "its environment says r", "its environment in /pr", "it was gone before it ",
    ]  # fmt: skip
    assert claims.differences(tree.members, float("inf")) == []
