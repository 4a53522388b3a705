from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from paper import Paper
from rich.console import Console

from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind, Phase
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Named, Plan, PlannedFault, PlannedJob
from torchaos.harness.reporting.terminal import live
from torchaos.harness.reporting.terminal.live import Live, Progress

JOB = PlannedJob(("torchrun", "train.py"), "/", {}, 2, 1, 60.0)
KILL = PlannedFault("kill", "process.kill", "rank", Target((1,)), Moment(1, 3, Phase.BACKWARD), {}, "kill.py", "Kill")
PLAN = Plan("kill-rank", "", 7, JOB, (KILL,), (Named("completed", {}),))


@dataclass
class Script:
    """A journal whose events are told one by one, at fixed times."""

    listeners: list[Callable[[Event], object]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def listen(self, listener: Callable[[Event], object]) -> None:
        self.listeners.append(listener)

    def snapshot(self) -> list[Event]:
        return list(self.events)

    def at(
        self, second: float, kind: Kind, rank: int | None = None, attempt: int = 0, step: int | None = None, **data: Any
    ) -> None:
        source = "harness" if rank is None else f"rank{rank}-a{attempt}"
        event = Event(kind, source, len(self.events), 1795207785.0 + second, 100.0 + second, rank, attempt, step, data)
        self.events.append(event)
        for listener in self.listeners:
            listener(event)

    def step(self, second: float, rank: int, step: int, attempt: int = 0, loss: float | None = 3.0) -> None:
        seen = {"samples": [[rank, step]], "indices": None, "lr": [0.1], "opt_step": None, "sched_step": None}
        self.at(
            second,
            Kind.STEP,
            rank,
            attempt,
            step,
            losses=[] if loss is None else [loss],
            phases={},
            skipped=False,
            **seen,
        )


def tell_the_story(script: Script) -> None:
    """A rank is killed in step 3; the job comes back from the checkpoint of step 2 and goes on to step 5."""
    script.at(0, Kind.STAGE, stage="prepare")
    script.at(0.1, Kind.STAGE, stage="launch")
    script.at(0.2, Kind.JOB_STARTED, submission=0, pid=4700)
    script.at(0.2, Kind.STAGE, stage="run")
    for rank in (0, 1):
        script.at(2, Kind.RANK_UP, rank, pid=4710 + rank, start_ticks=1, local_rank=rank, world_size=2, node=0)
    script.at(2.1, Kind.ARMED, fault="kill", targets=[1])
    for step in (1, 2):
        for rank in (0, 1):
            script.step(4 * step, rank, step, loss=3.5 - step / 10)
            script.at(4 * step, Kind.SAVE_BEGIN, rank, step=step, path=f"/run/step-{step}.tmp", format="dcp")
            script.at(
                4 * step + 0.1,
                Kind.SAVE_END,
                rank,
                step=step,
                path=f"/run/step-{step}.tmp",
                format="dcp",
                ok=True,
                blocked_s=0.1,
            )
        script.at(4 * step + 0.1, Kind.RENAMED, 0, path=f"/run/step-{step}.tmp", to=f"/run/step-{step}")
    script.at(9, Kind.APPLYING, 1, fault="kill", phase="backward", global_step=3, pid=4711)
    script.at(9.01, Kind.RANK_EXITED, 1, pid=4711, start_ticks=1, exit_code=-9)
    script.at(9.2, Kind.ELASTIC_FAILURE, exit_code=-9, local_rank=1, pid=4711)
    script.at(9.3, Kind.ELASTIC_RESTART, attempts_left=2)
    for rank in (0, 1):
        script.at(12, Kind.RANK_UP, rank, 1, pid=4720 + rank, start_ticks=2, local_rank=rank, world_size=2, node=0)
    for rank in (0, 1):
        script.at(13, Kind.LOAD_BEGIN, rank, 1, path="/run/step-2", format="dcp")
        script.at(13.5, Kind.LOAD_END, rank, 1, path="/run/step-2", format="dcp", ok=True, numbers={"step": 2})
    for step in (1, 2, 3):
        for rank in (0, 1):
            script.step(13.5 + step, rank, step, 1, loss=3.2 - step / 10)
    script.at(17, Kind.NOTE, text="odd \x1b[2J [bold]line[/bold]")
    script.at(18, Kind.JOB_EXITED, submission=0, pid=4700, exit_code=0)
    script.at(18.1, Kind.STAGE, stage="collect")
    script.at(18.2, Kind.STAGE, stage="end")


def test_without_a_terminal_a_line_per_event(paper: type[Paper]) -> None:
    """The story of a run is told in timestamped lines: faults as they land, attempts, and steps now and then."""
    file, script = paper(), Script()
    with Live(script, PLAN, Console(file=file, width=100)):  # type: ignore[arg-type]
        tell_the_story(script)
    assert (
        file.getvalue()
        == """\
   0.00 s  kill-rank, seed 7, 2026-11-20 20:49:45 UTC
   0.10 s  starting the job
   0.20 s  the job runs as pid 4700
   2.00 s  attempt 0: 2 of 2 ranks are up
   2.10 s  process.kill (kill) is armed
   4.00 s  attempt 0: the first step is done
   8.00 s  step 1, attempt 0, loss 3.4, last checkpoint step-1
   9.00 s  process.kill (kill) hits rank 1 in step 3, backward
   9.01 s  rank 1 is gone (pid 4711): killed by SIGKILL
   9.20 s  torchelastic sees that local rank 1 failed: killed by SIGKILL
   9.30 s  torchelastic restarts; 2 restarts are left
  12.00 s  attempt 1: 2 of 2 ranks are up
  13.50 s  attempt 1: loaded step-2
  14.50 s  step 3, attempt 1, loss 3.1, last checkpoint step-2
  14.50 s  attempt 1: the first step is done
  17.00 s  note: odd \\x1b[2J [bold]line[/bold]
  18.00 s  step 5, attempt 1, loss 2.9, last checkpoint step-2
  18.00 s  the job ended with exit code 0
  18.10 s  collecting the evidence
"""
    )


def test_on_a_terminal_a_row_per_rank(paper: type[Paper], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same lines scroll by above a row per rank with its step, attempt and loss; the cursor is given back."""
    monkeypatch.setenv("TERM", "xterm-256color")
    file, script = paper(), Script()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    with Live(script, PLAN, console, steps=60):  # type: ignore[arg-type]
        tell_the_story(script)
    told = file.getvalue()
    assert "process.kill (kill) hits rank 1 in step 3, backward" in told
    assert "step 5, attempt 1, loss 2.9" in told
    assert "[bold]line[/bold]" in told
    assert "\x1b[2J" not in told
    assert told.rindex("\x1b[?25h") > told.rindex("\x1b[?25l")


def test_ci_gets_lines(paper: type[Paper], monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI there are lines even where the runner pretends to be a terminal."""
    monkeypatch.setenv("CI", "true")
    file, script = paper(), Script()
    with Live(script, PLAN, Console(file=file, width=100, force_terminal=True)):  # type: ignore[arg-type]
        tell_the_story(script)
    assert "\x1b[?25l" not in file.getvalue()


def test_a_step_line_only_every_few_seconds(paper: type[Paper]) -> None:
    """A thousand steps in ten seconds make one line about steps, not a thousand."""
    file, script = paper(), Script()
    with Live(script, PLAN, Console(file=file, width=100)):  # type: ignore[arg-type]
        for step in range(1, 1001):
            script.step(step / 100, 0, step)
    lines = [line for line in file.getvalue().splitlines() if ", attempt 0, loss" in line]
    assert len(lines) == int(9.99 / live.STEPS_EVERY_S)


@pytest.mark.parametrize(("silent", "told"), [(None, "loss {0}"), (0, "loss 1{0} on rank 1")])
def test_the_loss_is_always_of_the_same_rank(silent: int | None, told: str) -> None:
    """Ranks have different losses, and now one is ahead, now the other: the line has rank 0's loss in the step that it
    names. Where rank 0 has no loss, the line says whose loss it is."""
    known, script = Progress(lambda attempt: 0), Script()
    script.listen(known.note)
    for step in range(1, 9):
        for rank in (0, 1) if step % 2 else (1, 0):
            script.step(step, rank, step, loss=None if rank == silent else 10.0 * rank + step)
            if step > 1:
                slowest = min(view.local_step for view in known.ranks.values())
                assert known.in_words().endswith(told.format(slowest)), (step, rank)


@pytest.mark.parametrize(("saved", "renamed", "told"), [
    ("/job/step-2.pt.tmp", "", "step-1"), ("/job/step-2.pt.tmp", "/job/step-2.pt", "step-2.pt"),
    ("/job/tmp-step-2/model.pt", "", "step-1"), ("/job/.step-2/model.pt", "/job/step-2/model.pt", "step-2"),
    ("/job/partial_1.pt", "", "step-1"), ("/job/partial_1.pt", "/job/step-2.pt", "step-2.pt"),
    ("/job/step-2/model_part_1.pt", "", "step-1"), ("/job/rank0/24.pt", "", "24.pt"),
])  # fmt: skip
def test_the_last_checkpoint_is_a_whole_one(saved: str, renamed: str, told: str) -> None:
    """A file that is temporary or a part by its name is no checkpoint before it gets another name."""
    known, script = Progress(lambda attempt: 0), Script()
    script.listen(known.note)
    for step, path in ((1, "/job/step-1"), (2, saved)):
        script.at(step, Kind.SAVE_END, 0, 0, step, path=path, format="torch", ok=True, blocked_s=0.1)
    if renamed:
        script.at(3, Kind.RENAMED, 0, 0, path=saved, to=renamed)
    assert known.checkpoint == told


def test_the_twin_is_called_one(paper: type[Paper]) -> None:
    """A run without faults and assertions introduces itself as the twin."""
    file, script = paper(), Script()
    with Live(script, Plan("kill-rank", "", 7, JOB, (), ()), Console(file=file, width=100)):  # type: ignore[arg-type]
        script.at(0, Kind.STAGE, stage="prepare")
    assert "kill-rank: its fault-free twin" in file.getvalue()


def test_a_failed_rollback_is_told(paper: type[Paper]) -> None:
    """What could not be taken back is told in capitals, with the reason; what was, quietly."""
    file, script = paper(), Script()
    with Live(script, PLAN, Console(file=file, width=100)):  # type: ignore[arg-type]
        script.at(1, Kind.ROLLED_BACK, fault="kill", verified=False, reason="pid 1 is stopped")
        script.at(2, Kind.ROLLED_BACK, fault="kill", verified=True)
        script.at(3, Kind.HEALED, record="job", handle="processes", verified=True)
        script.at(4, Kind.MISSED, fault="kill", reason="hold expired")
    lines = [line.split(" s  ", 1)[1] for line in file.getvalue().splitlines()[1:]]
    assert lines == [
        "process.kill (kill) is NOT rolled back: pid 1 is stopped",
        "process.kill (kill) is rolled back, and verified",
        "process.kill (kill) missed: hold expired",
    ]


def test_a_closed_pipe_ends_only_the_display(paper: type[Paper]) -> None:
    """When nobody reads any more, the journal's thread never hears of it, and the run goes on."""

    class Closed(Paper):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    script = Script()
    with Live(script, PLAN, Console(file=Closed(), width=80)):  # type: ignore[arg-type]
        tell_the_story(script)
    assert len(script.events) > 20


def test_a_stuck_terminal_holds_nothing_up(paper: type[Paper], monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that was stopped blocks neither the journal's thread nor the end of the run."""
    monkeypatch.setattr(live, "LEAVE_S", 0.01)
    go = threading.Event()

    class Stuck(Paper):
        def write(self, text: str) -> int:
            go.wait(300)
            return len(text)

    script = Script()
    with Live(script, PLAN, Console(file=Stuck(), width=80)) as shown:  # type: ignore[arg-type]
        tell_the_story(script)
        assert not go.is_set()
    assert shown._thread.is_alive()
    go.set()
    shown._thread.join(300)
    assert not shown._thread.is_alive()


def test_it_follows_a_real_journal(paper: type[Paper], tmp_path: Path) -> None:
    """Events of the harness's own journal are shown as they are emitted."""
    file, journal = paper(), Journal(tmp_path)
    with Live(journal, PLAN, Console(file=file, width=80)):
        journal.emit(Kind.NOTE, {"text": "hello"})
    journal.close()
    assert "note: hello" in file.getvalue()
