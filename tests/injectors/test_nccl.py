"""The faults in NCCL's connections: their orders, their proof, and plans that lack something."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from torchaos.harness.host import native_libraries
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.nccl_connections import ENV_NCCL_NET, NetKind, NetOrder
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.running import capabilities
from torchaos.harness.running.planner import make_plan
from torchaos.harness.scenario.loader import load
from torchaos.injectors.nccl import Corrupt, Delay, Error, Flap, Nics, Refuse, Stall, Throttle

READY = sorted((Path(__file__).parents[2] / "scenarios" / "collective").glob("nccl-*.yaml"))
PLAN = Plan("made-up", "", 7, PlannedJob(("torchrun", "train.py"), "/job", {}, 2, 1, 60.0), (), ())
ONE_NODE = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


@pytest.mark.parametrize(
    ("injector", "order"),
    [
        (Stall(peers=[0, 2], way="in", connection=1), NetOrder(NetKind.STALL, peers=[0, 2], way="in", connection=1)),
        (Flap(down=0.5, up=2.0), NetOrder(NetKind.FLAP, 500_000_000, 2_000_000_000)),
        (Delay(time=0.02, min_bytes=5, max_bytes=9), NetOrder(NetKind.DELAY, 20_000_000, min_bytes=5, max_bytes=9)),
        (Throttle(megabytes=2.5), NetOrder(NetKind.THROTTLE, 2_500_000)),
        (Error(code="remote", nth=3), NetOrder(NetKind.FAIL, 6, nth=3)),
        (Corrupt(place=0.25), NetOrder(NetKind.CORRUPT, 250_000)),
        (Refuse(peers=[1]), NetOrder(NetKind.REFUSE, 0, peers=[1])),
        (Refuse(how="system", way="out"), NetOrder(NetKind.REFUSE, 2, way="out")),
        (Nics(count=1, mbit=100), NetOrder(NetKind.NICS, 1, 100)),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_what_is_ordered(injector: Any, order: NetOrder) -> None:
    """The parameters of a scenario become one order for the plug-in."""
    orders: list[NetOrder] = []
    injector.apply(SimpleNamespace(nccl_net=orders.append))
    assert [_plain(one) for one in orders] == [_plain(order)]


def _plain(order: NetOrder) -> dict[str, Any]:
    return {**vars(order), "peers": list(order.peers)}


def event(kind: Kind, at: float, data: dict[str, Any], rank: int | None = None) -> Event:
    source = "harness" if rank is None else f"rank{rank}"
    return Event(kind, source, int(at * 1000), 0.0, at, rank, None if rank is None else 0, 1, data)


def stalled(*more: Event) -> Record:
    """Rank 1 is hit at 10 s until 13 s, and rank 0 makes no step meanwhile."""
    at = [8.0 + 0.1 * n for n in range(20)] + [13.1, 13.2]
    steps = [event(Kind.STEP, one, {"losses": [], "samples": []}, rank) for one in at for rank in (0, 1)]
    hit = event(Kind.APPLYING, 10.0, {"fault": "f", "phase": None, "global_step": 5, "pid": 101}, 1)
    over = event(Kind.ROLLED_BACK, 13.0, {"fault": "f", "verified": True})
    return Record(PLAN, tuple(sorted([*steps, hit, over, *more], key=lambda one: one.mono_s)), {})


def note(at: float, hits: int) -> Event:
    return event(Kind.NOTE, at, {"text": "stall", "fault": "f", "hits": hits}, 1)


def test_a_stall_is_proved_by_the_others() -> None:
    """The other rank stood still while it was on."""
    assert Stall().felt(stalled(note(13.1, 4)), "f") is not None


def test_a_fault_that_hit_nothing_was_not_felt() -> None:
    """Whatever kept the others: NCCL's transfers were none that the fault is about."""
    assert Stall().felt(stalled(note(13.1, 0)), "f") is None


def test_nics_are_proved_by_the_question_of_nccl() -> None:
    """Only the plug-in can see that NCCL asked; without a question the fault was not felt."""
    assert Nics(count=1).felt(stalled(note(13.1, 2)), "f") is not None
    assert Nics(count=1).felt(stalled(), "f") is None
    assert Nics(count=1).felt(stalled(note(13.1, 0)), "f") is None


def test_nics_without_a_change_are_refused() -> None:
    """Neither a number nor a speed."""
    with pytest.raises(ValueError, match="count, mbit"):
        Nics()


def plan(folder: Path, env: dict[str, str], nodes: int = 1) -> Plan:
    command = f"torchrun {'--nnodes 2 ' if nodes > 1 else ''}--nproc-per-node 2 train.py"
    text = {
        "scenario": "made-up", "launcher": "netns" if nodes > 1 else "local", "assert": ["completed"],
        "job": {"command": command, "env": env},
        "faults": [{"inject": "nccl.stall", "target": {"rank": 1}, "when": {"step": 5}, "for": "3s"}],
    }  # fmt: skip
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(text))
    return make_plan(load(path), path, seed=1)


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has all that is needed."""
    monkeypatch.setattr(capabilities, "check", lambda name: capabilities.Finding(name, True, "", ""))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    for name in ("NCCL_NET", "NCCL_NET_PLUGIN", *ONE_NODE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("with_gpus")
@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_the_ready_scenarios_can_be_planned(path: Path) -> None:
    """On a machine with GPUs; each needs the plug-in."""
    assert {"gpu", "nccl", "nccl_net"} <= set(make_plan(load(path), path, seed=1).needs)


@pytest.mark.usefixtures("with_gpus")
def test_what_keeps_nccl_from_the_plug_in_is_said_before(tmp_path: Path) -> None:
    """Ranks of one node that may use shared memory, and a network that the job has chosen: the plan says what to write.
    Two nodes need no switches."""
    assert plan(tmp_path, ONE_NODE).faults
    assert plan(tmp_path, {}, nodes=2).faults
    with pytest.raises(UsageError, match=r'write env: \{NCCL_P2P_DISABLE: "1", NCCL_SHM_DISABLE: "1"\}'):
        plan(tmp_path, {})
    with pytest.raises(UsageError, match=r"NCCL_NET=Socket.*remove NCCL_NET"):
        plan(tmp_path, {**ONE_NODE, "NCCL_NET": "Socket"})
    with pytest.raises(UsageError, match=r"NCCL_NET_PLUGIN=libnccl-net-ofi.so"):
        plan(tmp_path, {"NCCL_NET_PLUGIN": "libnccl-net-ofi.so"}, nodes=2)


@pytest.mark.parametrize(
    ("lacking", "says"),
    [("gpu", "GPU for each rank"), ("nccl", "CUDA build of torch"), ("nccl_net", "a C compiler")],
)
def test_a_machine_that_lacks_something_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, says: str
) -> None:
    """Before the job starts, with what to do: no GPU, a torch without NCCL, no compiler."""
    real = capabilities.CHECKS[lacking]

    def check(name: str) -> capabilities.Finding:
        return capabilities.Finding(name, name != lacking, "missing", real.remedy if name == lacking else "")

    monkeypatch.setattr(capabilities, "check", check)
    with pytest.raises(UsageError, match=rf"lacks {lacking} .*{says}"):
        plan(tmp_path, ONE_NODE)


def test_torch_for_the_cpu_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its version; a torch that this Python does not have may have it."""
    for version, found in (("2.13.0+cpu", False), ("2.13.0+cu130", True), ("2.13.0", True)):
        monkeypatch.setattr(capabilities, "installed", lambda _, version=version: {"torch": version})
        assert capabilities.check("nccl").present is found
    monkeypatch.setattr(capabilities, "installed", lambda _: {})
    assert capabilities.check("nccl").present


def test_the_environment_names_the_plug_in_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL_NET keeps NCCL from falling back to its own sockets. A path that NCCL would not load is refused."""
    library = SimpleNamespace(path=lambda: Path("/here/libnccl-net-torchaos.so"))
    monkeypatch.setattr(native_libraries, "NCCL_NET", library)
    assert native_libraries.nccl_net_environment(tmp_path / "pages") == {
        "NCCL_NET_PLUGIN": "/here/libnccl-net-torchaos.so", "NCCL_NET": "torchaos",
        ENV_NCCL_NET: str(tmp_path / "pages"),
    }  # fmt: skip
    for bad in ("/" + "x" * 260, "/a,b/lib.so"):
        library.path = lambda bad=bad: Path(bad)
        with pytest.raises(UsageError, match="NCCL can't load"):
            native_libraries.nccl_net_environment(tmp_path / "pages")
