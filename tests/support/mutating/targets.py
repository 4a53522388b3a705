"""The parts of the product that get damaged input, and the results that are allowed: success, or an error for the user.

A target is used in one folder and one process. `feed` gives it an input, and raises if the result is not allowed.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from zlib import crc32

from rich.console import Console

from mutating import inputs
from mutating.guard import Guard
from mutating.mutate import damaged
from torchaos.harness import registry
from torchaos.harness.agent import hooks, startup
from torchaos.harness.agent.injection.rank_faults import Pending
from torchaos.harness.analysis.verdict import judge
from torchaos.harness.host import processes
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol import packed_lines
from torchaos.harness.protocol.agent_plan import Moment, RankFault
from torchaos.harness.protocol.check_sums import sums_of
from torchaos.harness.protocol.control_pages import ControlPage
from torchaos.harness.protocol.wire import ENV_AGENT_PID, ENV_PLAN, FIELDS, EventFile, Kind
from torchaos.harness.record.events import journal
from torchaos.harness.record.history import base_of
from torchaos.harness.record.plan import After, Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.record.steps.packed_blocks import blocks_of
from torchaos.harness.reporting import result_files
from torchaos.harness.reporting.terminal import console
from torchaos.harness.reporting.terminal.live import Progress
from torchaos.harness.reporting.terminal.narrator import Narrator
from torchaos.harness.rollback.handles import REGISTRY, PageSlot
from torchaos.harness.rollback.reaper_client import undo_from_log
from torchaos.harness.running import capabilities
from torchaos.harness.running.conditions.progress import after_is_due
from torchaos.harness.running.engine.stages import BaseWriter
from torchaos.harness.running.planner import make_plan
from torchaos.harness.running.planner.fault_plans import Machine
from torchaos.harness.scenario.loader import load

LIMIT_S = 20.0  # for one input, on a busy machine


class Target(ABC):
    name: ClassVar[str]
    share: ClassVar[float]  # of all inputs

    def __init__(self, folder: Path, guard: Guard) -> None:
        self.folder, self._guard = folder, guard
        self._ours: set[int] = set()
        self.prepare()

    def prepare(self) -> None:  # noqa: B027
        """Called once, before the first input."""

    def end(self) -> None:  # noqa: B027
        """Restores what `prepare` changed outside its folder."""

    @abstractmethod
    def bases(self) -> Sequence[bytes]:
        """Valid inputs, which must all be accepted."""

    @abstractmethod
    def feed(self, raw: bytes) -> None:
        """Gives the target an input. Raises an error if the result is not allowed."""

    def draw(self, draw: Random) -> bytes:
        return damaged(draw.choice(self.bases()), draw)

    def try_one(self, raw: bytes) -> list[str]:
        """The harm that the input did; normally none. Raises as `feed` does."""
        with self._guard.watching(self.folder, LIMIT_S, self._ours):
            self.feed(raw)
        return self._guard.harm


class ScenarioTarget(Target):
    """`torchaos plan FILE`, without printing."""

    name, share = "scenario", 0.2

    def prepare(self) -> None:
        """Look up the machine's capabilities in advance, since that may start a program."""
        self._check, self._this = capabilities.check, Machine.this
        found, this = {name: capabilities.check(name) for name in capabilities.known()}, Machine.this()
        vars(capabilities)["check"] = found.__getitem__
        setattr(Machine, "this", lambda: this)  # noqa: B010

    def end(self) -> None:
        vars(capabilities)["check"] = self._check
        setattr(Machine, "this", self._this)  # noqa: B010

    def bases(self) -> Sequence[bytes]:
        return inputs.scenarios()

    def feed(self, raw: bytes) -> None:
        file = self.folder / "scenario.yaml"
        file.write_bytes(raw)
        try:
            scenario = load(file)
        except UsageError as error:
            for line in re.split("\n(?=/)", str(error)):
                assert re.match(rf"{re.escape(str(file))}:[1-9]\d*:[1-9]\d*: \S", line), line
            return
        with suppress(UsageError):
            make_plan(scenario, file, scenario.seed)


class OverrideTarget(Target):
    """`--set KEY=VALUE`."""

    name, share = "override", 0.05

    def prepare(self) -> None:
        self._file = self.folder / "scenario.yaml"
        self._file.write_bytes(inputs.GOOD.encode())

    def bases(self) -> Sequence[bytes]:
        return (*inputs.regressions(self.name), b"seed=8", b"job.timeout=2m", b"faults.0.when.step=30", b"job.env.A=b",
                b"faults.0.target={rank: 0}", b"assert.0.recovery_time.catch_up=1s")  # fmt: skip

    def feed(self, raw: bytes) -> None:
        with suppress(UsageError):
            load(self._file, [raw.decode("utf-8", "surrogateescape")])


class _FileOfRun(Target):
    """One file of a run directory is damaged, and restored afterwards. An input: name, newline, contents."""

    files: ClassVar[Sequence[str]]

    def prepare(self) -> None:
        self.run = self.folder / "run"
        shutil.copytree(inputs.RUN, self.run, dirs_exist_ok=True)
        for name in ("undo", "logs", "job", "events"):
            (self.run / name).mkdir(exist_ok=True)

    @cached_property
    def whole(self) -> dict[str, bytes]:
        found = [path for pattern in self.files for path in sorted(self.run.glob(pattern))]
        return {str(path.relative_to(self.run)): path.read_bytes() for path in found}

    def bases(self) -> Sequence[bytes]:
        return [*inputs.regressions(self.name), *(name.encode() + b"\n" + raw for name, raw in self.whole.items())]

    def draw(self, draw: Random) -> bytes:
        name, _, raw = draw.choice(self.bases()).partition(b"\n")
        return name + b"\n" + damaged(raw, draw)

    def feed(self, raw: bytes) -> None:
        name, _, content = raw.partition(b"\n")
        path = self.run / os.fsdecode(name)
        original = self.whole[os.fsdecode(name)]
        try:
            path.write_bytes(content)
            self.look()
        finally:
            path.write_bytes(original)

    def look(self) -> None:
        raise NotImplementedError


class JudgeTarget(_FileOfRun):
    """`torchaos judge DIR` on a run directory, with its reports."""

    name, share = "run directory", 0.2
    files = ("plan.json", "events/*.jsonl", "artifacts/*.json", "twins/0/plan.json", "twins/0/events/*.jsonl",
             "twins/0/artifacts/*.json", "scenario.yaml", "result.json")  # fmt: skip

    def look(self) -> None:
        with suppress(ChaosError):
            result = judge(RunDir(self.run).check())
            console.show(result, Console(file=io.StringIO(), width=100))
            result_files.write_junit([result], self.folder / "junit.xml")
            result_files.write_json([result], self.folder / "result.json")


class LiveTarget(_FileOfRun):
    """The agent's event files, as a run reads them while it is running."""

    name, share = "agent events", 0.2
    files = ("events/rank*.jsonl",)

    def prepare(self) -> None:
        super().prepare()
        self._plan = Plan.read(self.run / "plan.json")
        parameters: dict[str, dict[str, Any]] = {
            "steps": {"at_least": 3}, "loss_below": {"value": 1.0}, "no_progress": {"longer_than": 1.0},
            "attempts": {"more_than": 1}, "wall": {"longer_than": 1.0},
        }  # fmt: skip
        self._conditions = [
            registry.find("conditions", name)(**parameters.get(name, {}))
            for name in ("steps", "ranks_up", "loss_below", "no_progress", "attempts", "wall")
        ]
        self._own = [journal.read(line) for line in (self.run / "events" / "harness.jsonl").read_bytes().splitlines()]

    def look(self) -> None:
        lines = [line for name in self.whole for line in (self.run / name).read_bytes().splitlines()]
        events = list(self._own)
        for line in lines:
            with suppress(ValueError):
                events.append(journal.read(line))
        narrator, progress = Narrator(self._plan), Progress(lambda attempt: base_of(events, attempt)[0])
        for event in events:
            narrator.tell(event)
            progress.note(event)
        if progress.ranks:
            progress.in_words()
        for condition in self._conditions:
            condition.holds(events, time.monotonic())
        for trigger in (After(0.0, None), After(0.0, None, "applied", 2), *(
            After(0.0, "process.kill", state) for state in ("applied", "felt", "recovered", "rolled_back")
        )):  # fmt: skip
            after_is_due(trigger, events, 1e9)
        BaseWriter([]).update(events)


class PackedTarget(Target):
    """The packed line of a step's event, as every reader reads it. It is refused, or read as the event that it was."""

    name, share = "packed event", 0.2

    def prepare(self) -> None:
        paths = sorted(inputs.RUN.glob("events/rank*.jsonl"))
        events = [journal.read(line) for path in paths for line in path.read_bytes().splitlines()]
        file = EventFile(self.folder / "packed.jsonl", "rank1-a0-p17", 1, 0)
        for event in events:
            if event.kind is Kind.STEP:
                known = event.data["samples"]
                digests = None if known is None else bytes.fromhex("".join(known))
                given = {key: event.data[key] for key in FIELDS[Kind.STEP]}
                file.emit_step(event.step or 0, **{**given, "samples": digests})
                sums = sums_of(digests or b"", event.data["indices"])
                file.emit_step(event.step or 0, **{**given, "samples": None, "indices": None, "sums": sums})
        file.close()
        self._lines = io.BytesIO((self.folder / "packed.jsonl").read_bytes()).readlines()
        self._events = [journal.read(line) for line in self._lines]

    def bases(self) -> Sequence[bytes]:
        return [*inputs.regressions(self.name), *self._lines]

    def feed(self, raw: bytes) -> None:
        for line in raw.split(b"\n"):
            try:
                event = journal.read(line)
            except (ValueError, RecursionError):
                continue
            assert event in self._events, event
        lines = raw.splitlines(keepends=True)
        for block in blocks_of([line if line.endswith(b"\n") else line + b"\n" for line in lines])[0]:
            block.again()
            for row in range(len(block)):
                assert block.event(row) in self._events, block.event(row)


class SealedTarget(PackedTarget):
    """A packed record with any values and a check sum that fits, as from a later agent with a defect. All readers
    refuse it, or all read the same. An input: the text before the record, a blank, the record without its check
    sum."""

    name, share = "sealed event", 0.1

    def bases(self) -> Sequence[bytes]:
        parts = [line.removesuffix(b"\n").partition(b" ") for line in self._lines]
        records = [
            text + blank + packed_lines._with_newlines(coded)[: -packed_lines.CRC] for text, blank, coded in parts
        ]
        return [*inputs.regressions(self.name), *records]

    def feed(self, raw: bytes) -> None:
        text, blank, record = raw.partition(b" ")
        prefix = text.replace(b"\n", b"") + blank
        record += crc32(record, crc32(prefix)).to_bytes(packed_lines.CRC, "little")
        line = prefix + packed_lines._without_newlines(record) + b"\n"
        (blocks, _left), seen = blocks_of([line]), list[str]()
        with suppress(ValueError, RecursionError):
            seen.append(repr(journal.read(line)))
        for block in blocks:
            block.again()
            assert [repr(block.event(0))] == seen, (line, seen)


class PageTarget(Target):
    """A control page, as the harness, the reaper and the agent read it."""

    name, share = "control page", 0.1

    def bases(self) -> Sequence[bytes]:
        return [*inputs.regressions(self.name), *(path.read_bytes() for path in inputs.RUN.glob("agent/pages/*.page"))]

    def draw(self, draw: Random) -> bytes:
        raw = bytearray(draw.choice(self.bases()))
        if draw.random() < 0.7 and len(raw) == ControlPage.SIZE:
            for _ in range(draw.randrange(1, 4)):
                word = draw.choice((-1, 0, 1, 2**62, -(2**63), 2**63 - 1, draw.randrange(2**63)))
                raw[8 * (at := draw.randrange(8)) : 8 * at + 8] = word.to_bytes(8, "little", signed=True)
            return bytes(raw)
        return damaged(bytes(raw), draw)

    def feed(self, raw: bytes) -> None:
        path = self.folder / "fault.page"
        path.write_bytes(raw)
        slot = PageSlot(str(path))
        try:
            pending = Pending(RankFault("fault", Moment(0, 1, None), str(path)))
        except ValueError:
            with suppress(ValueError):
                slot.undo()
                slot.is_undone()
            return
        assert pending.armed in (True, False)
        assert pending.has_fired in (True, False)
        slot.undo()
        assert slot.is_undone()
        assert not pending.armed
        pending.page.close()


class UndoTarget(_FileOfRun):
    """An undo log, as recovery reads it. Whatever it says, nothing outside the run directory may change, and only
    processes of the run may get signals."""

    name, share = "undo log", 0.15
    files = ("undo/undo.jsonl",)

    def prepare(self) -> None:
        super().prepare()
        self._victim = subprocess.Popen(["sleep", "100000"], env={})
        self._ours = {self._victim.pid}
        data = self.run / "job" / "data"
        data.write_bytes(b"good")
        found, seen = data.stat(), processes.stat(self._victim.pid)
        assert seen
        victim, nobody = {"pid": self._victim.pid, "start_ticks": seen.ticks}, {"pid": 2**22, "start_ticks": 1}
        engine = {"engine": f"unix://{self.run}/docker.sock", "run_id": "x"}
        handles: list[dict[str, Any]] = [
            {"kind": "process", **victim, "action": "resume"},
            {"kind": "job_processes", "run_id": "the-run-of-nobody"},
            {"kind": "slurm_work", "name": "the-run-of-nobody", "job": "1"},
            {"kind": "slurm_node", "host": "nowhere", "run_id": "the-run-of-nobody"},
            {"kind": "kubernetes_objects", "run_id": "the-run-of-nobody", "kinds": "job.batch", "context": "nowhere"},
            {
                "kind": "kubernetes_agent", "mark": "the-run-of-nobody.node0", "pod": "nowhere", "uid": "1",
                "container": "trainer", "python": "python3", "context": "nowhere",
            },
            {"kind": "kubernetes_node", "name": "nowhere", "run_id": "the-run-of-nobody", "context": "nowhere"},
            {"kind": "page_slot", "path": str(self.run / "agent" / "pages" / "process.kill-rank1.page")},
            {"kind": "file", "path": str(data), "root": str(data.parent), "copy": str(self.run / "undo" / "0.copy"),
             "sha256": "770e607624d689265ca6c44884d0807d9b054d23c473c106c72be9de08b7376c", "mode": 0o644,
             "uid": 0, "gid": 0, "mtime_ns": found.st_mtime_ns, "inode": found.st_ino, "born_ns": 0},
            {"kind": "names", **victim, "path": str(self.run / "job" / "hosts"), "text": "127.0.0.1 localhost"},
            {"kind": "nft_table", **nobody, "family": "inet", "table": "torchaos_x"},
            {"kind": "link_up", **nobody, "device": "eth0"},
            {"kind": "qdisc", **nobody, "device": "eth0"},
            {"kind": "queue_rule", **nobody, "chain": "torchaos_x"},
            {"kind": "mount", "target": str(self.run / "job"), "tag": "torchaos-x"},
            {"kind": "cpu_cgroup", "path": str(self.run / "torchaos-x"), "home": str(self.run)},
            {"kind": "freezer_cgroup", "path": str(self.run / "torchaos-x"), "home": str(self.run)},
            {"kind": "memory_cgroup", "path": str(self.run / "torchaos-x"), "home": str(self.run)},
            {"kind": "containers", **engine}, {"kind": "docker_network", **engine}, {"kind": "docker_image", **engine},
            {"kind": "container", **engine, "id": "c0ffee", "part": "running", "good": {}},
            {"kind": "toxic", **nobody, "port": 1, "proxy": "s3", "mark": "torchaos_x"},
        ]  # fmt: skip
        (self.run / "undo" / "0.copy").write_bytes(b"good")
        (self.run / "job" / "hosts").write_text("")
        about = {"state": "planned", "owner": "x", "limit_s": 60.0, "irreversible": None}
        records = [
            {"record": str(number), **about, "handles": [handle]}
            for number, handle in enumerate(handles)
            if handle["kind"] in REGISTRY
        ]
        lines = [json.loads(line) for line in (self.run / "undo" / "undo.jsonl").read_text().splitlines()[:1]] + records
        (self.run / "undo" / "undo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def end(self) -> None:
        self._victim.kill()
        self._victim.wait()

    def look(self) -> None:
        (self.run / "job" / "data").write_bytes(b"baad")
        with suppress(ChaosError):
            undo_from_log(self.run)
        if self._victim.poll() is not None:
            self.__class__.prepare(self)
            self.__dict__.pop("whole", None)


class AgentPlanTarget(_FileOfRun):
    """The agent's plan, as a rank reads it at its start. The job must never notice damage. The path of the events'
    folder is not damaged, because the agent trusts it."""

    name, share = "agent plan", 0.1
    files = ("agent/plan.json",)

    def prepare(self) -> None:
        super().prepare()
        plan = self.run / "agent" / "plan.json"
        plan.write_text(plan.read_text().replace('"/run/', f'"{self.run}/'))
        self._env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", ENV_PLAN: str(plan)}
        self._install_before, hooks.install = hooks.install, self._install

    def end(self) -> None:
        hooks.install = self._install_before

    @staticmethod
    def _install(agent: Any) -> None:
        """The same as in a rank, without the hooks, which could not be removed."""
        agent.started("2.13")
        agent.faults.load()
        for phase in ("data", "forward"):
            agent.enter(phase)

    def draw(self, draw: Random) -> bytes:
        events = json.dumps(f"{self.run}/events").encode()
        while events not in (raw := super().draw(draw)):
            pass
        return raw

    def look(self) -> None:
        before = dict(os.environ)
        os.environ.update(self._env)
        try:
            with redirect_stderr(io.StringIO()) as said:
                startup.start_in_rank()
            assert len(said.getvalue()) < 1000, "more than a line or two on the job's stderr"
        finally:
            for name in (*self._env, ENV_AGENT_PID):
                os.environ.pop(name, None)
            os.environ.update(before)
            for path in (self.run / "events").glob("rank1-a0-p*x.jsonl"):
                path.unlink()


TARGETS: tuple[type[Target], ...] = (
    ScenarioTarget, OverrideTarget, JudgeTarget, LiveTarget, PackedTarget, SealedTarget, PageTarget, UndoTarget,
    AgentPlanTarget,
)  # fmt: skip
__all__ = ["TARGETS", "Kind", "Target"]
