"""The wait of torchelastic or the process group in a recovery, and the setting that shortens it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.analysis.explanations import PATIENCE, advice
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.monitoring.probes.job_log import CAUSES
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Recovery

_SLOW = {"detected": 0.1, "torn_down": 0.2, "rendezvous": 15.2, "workers_up": 15.3, "caught_up": 20.0}


def _run(trainer: Any, *more: tuple[Kind, float, int | None, dict[str, Any]], **job: Any) -> Record:
    """A run in which rank 1 is killed, with these further events: kind, seconds since the fault, rank, payload."""
    run: Record = trainer(kills=[(18, 1)], worlds=job.pop("worlds", {})).record()
    hit_s = landings(run)[0].at_s
    events = [
        Event(kind, "extra", number, 0.0, hit_s + after_s, rank, 0, None, data)
        for number, (kind, after_s, rank, data) in enumerate(more)
    ]
    planned: PlannedJob = replace(run.plan.job, **job)
    every = tuple(sorted((*run.events, *events), key=lambda event: event.mono_s))
    return Record(replace(run.plan, job=planned), every, {})


def _advice(run: Record, **parts: float) -> tuple[str, ...]:
    return advice(run, landings(run)[0], Recovery("kill", parts, 2))


_GONE = (Kind.NODE_EXITED, 0.1, None, {"submission": 0, "node": 1, "pid": 9, "exit_code": -9})


def test_a_quick_recovery_needs_no_advice(trainer: Any) -> None:
    """Nothing is said of waits that did not occur."""
    assert _advice(_run(trainer), detected=0.1, torn_down=0.2, rendezvous=0.4, workers_up=0.5, caught_up=3.0) == ()


def test_a_silent_node_costs_the_keep_alive(trainer: Any) -> None:
    """15 s of rendezvous after a node was gone are torchelastic's default."""
    (text,) = _advice(_run(trainer, _GONE, nodes=2), **_SLOW)
    assert text.startswith("15.0 of 20.0 s was the rendezvous: torchelastic waits 3 × 5 s for a node that is silent.")
    assert "`--rdzv-conf` (now keep_alive_interval=5,keep_alive_max_attempt=3)" in text


@pytest.mark.parametrize(
    "job", [
        {"command": ("torchrun", "--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3", "train.py")},
        {"command": ("torchrun", "--rdzv_conf=keep_alive_interval=1", "train.py")},
        {"env": {"PET_RDZV_CONF": "keep_alive_interval=1"}},
    ],
)  # fmt: skip
def test_the_settings_of_the_job_count(trainer: Any, job: dict[str, Any]) -> None:
    """What the command or the environment sets is shown in place of the default."""
    (text,) = _advice(_run(trainer, _GONE, nodes=2, **job), **_SLOW)
    assert "3 × 1 s for a node that is silent" in text


def test_the_last_call_costs_too_if_fewer_came(trainer: Any) -> None:
    """A job that may shrink waits for more nodes than it needs."""
    run = _run(trainer, _GONE, nodes=2, worlds={1: 1}, env={"PET_RDZV_CONF": "last_call_timeout=4"})
    (text,) = _advice(run, **_SLOW)
    assert "3 × 5 s for a node that is silent and 4 s for more nodes than it needs" in text
    assert "last_call_timeout=4" in text


def test_a_wait_without_its_event_is_not_explained(trainer: Any) -> None:
    """A slow rendezvous of nodes that are all there has another cause, and so has a rendezvous within one node."""
    assert _advice(_run(trainer, nodes=2), **_SLOW) == ()
    assert _advice(_run(trainer, _GONE, nodes=1), **_SLOW) == ()


def test_a_rank_that_ignores_sigterm_costs_thirty_seconds(trainer: Any) -> None:
    """The rank that was killed in the end is named, and that no setting of torchrun helps."""
    killed = (Kind.RANK_EXITED, 30.2, 0, {"pid": 1, "start_ticks": 0, "exit_code": -9})
    parts = {"detected": 0.1, "torn_down": 30.2, "rendezvous": 30.4, "caught_up": 34.0}
    (text,) = _advice(_run(trainer, killed), **parts)
    assert "until torchelastic killed rank 0, which did not end at SIGTERM" in text
    assert _advice(_run(trainer), **parts) == ()


def test_a_hang_costs_the_timeout_of_the_process_group(trainer: Any) -> None:
    """If a rank gave up waiting, as its log says, the time until then is the process group's timeout."""
    line = (Kind.LOG_CAUSE, 20.0, None, {"cause": "gloo-timeout", "line": "Timed out waiting"})
    parts = {"detected": 20.1, "torn_down": 20.3, "rendezvous": 20.4, "caught_up": 24.0}
    (text,) = _advice(_run(trainer, line), **parts)
    assert text.startswith("20.1 of 24.0 s passed until the hang was noticed (gloo-timeout)")
    assert _advice(_run(trainer), **parts) == ()


@pytest.mark.parametrize(
    ("causes", "words"), [
        (["gloo-timeout"], "(gloo-timeout): this is the timeout of the process group"),
        (["faulthandler"], "(faulthandler): this is the time that the job gave to `faulthandler"),
        (["faulthandler", "gloo-timeout"], "(faulthandler): this is the time that the job gave to `faulthandler"),
        (["nccl-watchdog-stuck"], "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    ],
)  # fmt: skip
def test_a_hang_is_put_down_to_what_ended_it(trainer: Any, causes: list[str], words: str) -> None:
    """Each kind of timeout is set in another place. The first that passed is what the job waited for."""
    lines = [
        (Kind.LOG_CAUSE, 9.9 + 0.1 * place, 0, {"cause": cause, "line": "", "advice": ""})
        for place, cause in enumerate(causes)
    ]
    (text,) = _advice(_run(trainer, *lines), detected=10.2, torn_down=10.3, rendezvous=10.5, caught_up=14.0)
    assert text.startswith("10.2 of 14.0 s passed until the hang was noticed (")
    assert words in text


def test_each_hang_has_its_setting() -> None:
    """A hang that is recognised in the log is explained by a timeout of its own."""
    assert PATIENCE.keys() == {cause.name for cause in CAUSES if cause.hang}
