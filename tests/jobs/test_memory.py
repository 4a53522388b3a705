"""The copies of gpt_memory.py: what the memory keepers of the nodes keep, and from which step a resume goes on."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


class Part:
    """State of one tensor, with elements (2,)."""

    def __init__(self, value: int) -> None:
        self.value = torch.full((2,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def keeper(jobs: None) -> Iterator[Any]:
    """A keeper's server, as a node has one."""
    server = importlib.import_module("memory_keeper").Server()
    yield server
    server.shutdown()
    server.server_close()


def seen(server: Any) -> Any:
    """The keeper, as a rank sees it."""
    return importlib.import_module("memory_keeper").Keeper("127.0.0.1", server.server_address[1])


def test_the_newest_parts_of_each_rank_are_kept(keeper: Any) -> None:
    """Older ones are replaced, and the steps that will be done again are forgotten."""
    ranks = seen(keeper)
    for step in range(1, 6):
        for rank in (0, 1):
            ranks.put(step, rank, f"{step} of {rank}".encode())
    assert sorted(ranks.parts()) == [(step, rank) for step in (3, 4, 5) for rank in (0, 1)]
    assert ranks.get(4, 1) == b"4 of 1"
    ranks.forget_after(3)
    assert sorted(ranks.parts()) == [(3, 0), (3, 1)]


def test_a_rank_that_dies_while_it_copies_leaves_no_part(keeper: Any) -> None:
    """Half of a part is not kept, and the one before it stays."""
    ranks = seen(keeper)
    ranks.put(1, 0, b"whole")
    with socket.create_connection(keeper.server_address) as dying:
        dying.sendall(b'{"do": "put", "step": 2, "rank": 0, "size": 10}\nhalf')
        dying.shutdown(socket.SHUT_WR)
        assert dying.recv(1) == b""
    assert ranks.parts() == [(1, 0)]


def test_a_keeper_that_is_gone_or_has_no_such_part_is_an_error_of_the_network(keeper: Any) -> None:
    """So that a save to a dead peer is a failed save, after which training goes on."""
    with pytest.raises(OSError, match="in the middle of an answer"):
        seen(keeper).get(1, 0)
    ranks = seen(keeper)
    keeper.shutdown()
    keeper.server_close()
    with pytest.raises(ConnectionRefusedError):
        ranks.put(1, 0, b"")


def test_a_step_counts_if_each_ranks_part_is_somewhere(jobs: None) -> None:
    """Of two ranks, the first has its part of step 8 alone, and those of step 4 are on two nodes."""
    newest = importlib.import_module("gpt_memory").newest
    assert newest([[(8, 0), (4, 0)], [(4, 1)]]) == 4
    assert newest([[(8, 0)], []]) == 0


@pytest.fixture
def store(keeper: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The job's store, in a process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    for name, value in {
        "MEMORY_KEEPER": keeper.server_address[1], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    yield importlib.import_module("gpt_memory").InMemory(Path("unused"), 3, timedelta(seconds=30))
    dist.destroy_process_group()


def test_a_resume_gets_back_what_was_saved_last(store: Any) -> None:
    """What follows is forgotten, so that parts of two lives are never mixed; and there is no file."""
    for step in (4, 8):
        store.save(step, {"part": Part(step)})
    store.wait()
    part = Part(0)
    assert store.restore({"part": part}) == 8
    assert part.value.tolist() == [8.0, 8.0]
    assert not Path("unused").exists()


def test_a_job_without_copies_begins_afresh(store: Any) -> None:
    """The keepers are new, too."""
    assert store.restore({"part": Part(0)}) == 0


def test_a_node_without_a_keeper_is_told_how_to_start_one(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks end at once, before a step: a job whose copies nobody keeps would only seem to be safe."""
    monkeypatch.delenv("MEMORY_KEEPER")
    with pytest.raises(SystemExit, match=r"this node has no memory keeper: run memory_keeper.py torchrun"):
        type(store)(Path("unused"), 3, timedelta(seconds=30))


def test_a_keeper_ends_with_its_command_and_leaves_nothing(jobs: None) -> None:
    """Its exit code is the command's, and its port is closed: the copies go with it."""
    script = str(importlib.import_module("memory_keeper").__file__)
    ask = "import os; print(os.environ['MEMORY_KEEPER'], flush=True); os._exit(3)"
    done = subprocess.run(
        [sys.executable, script, sys.executable, "-c", ask], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(done.stdout)), 5.0)


def test_a_keeper_that_is_gone_costs_a_save_and_not_the_job(
    store: Any, keeper: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next save says which one has failed."""
    keeper.shutdown()
    keeper.server_close()
    store.save(4, {"part": Part(4)})
    store.ready(8)
    assert "the checkpoint before step 8 failed, training goes on" in capsys.readouterr().out


def test_a_save_is_over_when_its_copy_has_arrived(store: Any, keeper: Any, tmp_path: Path) -> None:
    """The checkpoint of gpt_mirrored.py is in its folder, and what this rank wrote of it in the keeper, too."""
    mirrored = importlib.import_module("gpt_mirrored").Mirrored(tmp_path, 3, timedelta(seconds=30))
    mirrored.save(5, {"part": Part(5)})
    mirrored.wait()
    (written,) = (tmp_path / "step-5").glob("__0_*.distcp")
    assert seen(keeper).get(5, 0) == written.read_bytes()
    part = Part(0)
    assert mirrored.restore({"part": part}) == 5
    assert part.value.tolist() == [5.0, 5.0]
