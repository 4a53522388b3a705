"""checkpoint_integrity after a checkpoint was damaged: the job loads it, uses an older one, or never comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.checkpoint_integrity import CheckpointIntegrity
from torchaos.assertions.no_lost_work import NoLostWork
from torchaos.harness.analysis.checkpointing import damage_reaction
from torchaos.harness.analysis.checkpointing.damage_reaction import Did
from torchaos.harness.interfaces import Finding, Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record

ROOT = "/job/checkpoints"


def _inventory() -> dict[str, Any]:
    ones = [
        {"path": f"step-{step}", "format": "dcp", "step": step, "complete": True, "loadable": True, "problem": None,
         "tensors": {"w": f"w{step}"}, "values": {}, "bytes": 10}
        for step in (20, 25, 30)
    ]  # fmt: skip
    return {"root": ROOT, "checkpoints": ones}


def _record(trainer: Any, back: int = 0, op: str = "write", until: str | None = None, **how: Any) -> Record:
    """Killed in step 18 and resumed, `back` checkpoints behind the newest, which was damaged at the very death."""

    class Resumes(trainer):  # type: ignore[misc]
        def _resume(self, attempt: int, world: int) -> Any:
            for _ in range(back if attempt else 0):
                self._saved.pop(max(self._saved))
            return super()._resume(attempt, world)

    made: Record = Resumes(kills=[(18, 1)], **how).record(inventory=_inventory())
    died = next(event for event in made.events if event.kind is Kind.RANK_EXITED)
    there = [{"path": f"{ROOT}/step-{step}", "step": step} for step in (15, 10, 5)]
    about = {"file": f"{ROOT}/step-15/__0_0.distcp", "checkpoint": f"{ROOT}/step-15", "step": 15, "op": op}
    told = {"what": "damaged", "effect": "step-15/__0_0.distcp (w) was changed at byte 7", "offset": 7}
    new: list[tuple[Kind, dict[str, Any], float]] = [
        (Kind.APPLYING, {"phase": "start", "global_step": None, "pid": None}, 0.001),
        (Kind.EFFECT, {"what": "survey", "effect": "3 are there", "checkpoints": there}, 0.002),
        (Kind.EFFECT, {**about, **told}, 0.003),
        *([(Kind.EFFECT, {"what": "gone", "effect": "gone", "file": about["file"]}, 0.004)] if until == "gone" else []),
    ]
    added = [
        Event(kind, "harness", 10_000 + number, 0.0, died.mono_s + after, data={"fault": "damage", **data})
        for number, (kind, data, after) in enumerate(new)
    ]
    return replace(made, events=tuple(sorted([*made.events, *added], key=lambda event: event.mono_s)))


def _judge(record: Record) -> Finding:
    return CheckpointIntegrity().judge(record, [])


def test_resumed_from_damaged_data(trainer: Any) -> None:
    """It is failed however well the rest looks, and the reason names checkpoint, attempt and damage."""
    record = _record(trainer)
    finding = _judge(record)
    assert finding.outcome is Outcome.FAILED
    assert finding.reason == (
        "the job resumed from damaged data: attempt 1 loaded step-15 (step 15), in which step-15/__0_0.distcp (w) was "
        "changed at byte 7, and did not notice"
    )
    evidence = damage_reaction.felt(record, "damage")
    assert evidence
    assert "and it loaded step-15" in evidence.what


@pytest.mark.parametrize(
    ("part", "saved", "outcome"), [("w", "w", "passed"), ("w", "x", "failed"), ("v", "w", "failed")]
)
def test_a_damaged_file_that_was_read_and_not_used(trainer: Any, part: str, saved: str, outcome: str) -> None:
    """A job with two copies reads the damaged one and takes the other: all that it saves later is the twin's. It is not
    so when a later tensor differs, or when what was damaged is in no later checkpoint."""
    run, twin = _record(trainer), trainer().record(inventory=_inventory())
    events = [replace(e, data={**e.data, "part": part}) if e.data.get("what") == "damaged" else e for e in run.events]
    ours = _inventory()
    for one in ours["checkpoints"]:
        one["tensors"] = {"w": one["tensors"]["w"].replace("w", saved)}
    run = replace(run, events=tuple(events), artifacts={**run.artifacts, "inventory": ours})
    assert CheckpointIntegrity().judge(run, [twin]).outcome.value == outcome


def test_fell_back_to_the_newest_whole_one(trainer: Any) -> None:
    """That is what it should do."""
    record = _record(trainer, back=1)
    assert [one.did for one in damage_reaction.meetings(record)] == [Did.FELL_BACK]
    assert damage_reaction.meetings(record)[0].best == (f"{ROOT}/step-10", 10)
    assert _judge(record).outcome is Outcome.PASSED, _judge(record).reason
    evidence = damage_reaction.felt(record, "damage")
    assert evidence
    assert "went on from step 10" in evidence.what


CHAIN = {"step-10": [], "step-15": ["step-10"], "step-20": ["step-15", "step-10"], "step-30": []}
ASIDE = {"step-10": [], "step-20.damaged": ["step-15"], "step-30": []}  # step 15 was removed
GONE = {"step-10": [], "step-25": ["step-10"], "step-30": []}  # nobody knows on what step 20 was built
WHOLE: dict[str, list[str]] = {"step-10": [], "step-15": [], "step-20": [], "step-25": [], "step-30": []}


def _with_deltas(trainer: Any, loads: int, builds_on: dict[str, list[str]], killed: int = 23) -> Record:
    """Step 15 is damaged, and step 20 is saved after that; then a rank dies, and the job goes back to step `loads`.
    `builds_on`: of the checkpoints in the inventory, by name."""

    class Resumes(trainer):  # type: ignore[misc]
        def _resume(self, attempt: int, world: int) -> Any:
            for step in [step for step in self._saved if attempt and step > loads]:
                self._saved.pop(step)
            return super()._resume(attempt, world)

    entries = [
        {"path": name, "format": "dir", "step": int(name[5:7]), "complete": name in WHOLE, "loadable": True,
         "problem": None if name in WHOLE else "its name says that it is not a finished checkpoint",
         "tensors": {"w": name[:7]}, "values": {}, "bytes": 10, "builds_on": links}
        for name, links in builds_on.items()
    ]  # fmt: skip
    made: Record = Resumes(kills=[(killed, 1)]).record(inventory={"root": ROOT, "checkpoints": entries})
    after = next(event for event in made.events if event.kind is Kind.STEP and event.step == 17)
    about = {"file": f"{ROOT}/step-15/__0_0.distcp", "checkpoint": f"{ROOT}/step-15", "step": 15, "op": "write"}
    there = [{"path": f"{ROOT}/step-{step}", "step": step} for step in (15, 10, 5)]
    new: list[tuple[Kind, dict[str, Any]]] = [
        (Kind.APPLYING, {"phase": "start", "global_step": None, "pid": None}),
        (Kind.EFFECT, {"what": "survey", "effect": "3 are there", "checkpoints": there}),
        (Kind.EFFECT, {**about, "what": "damaged", "effect": "step-15/__0_0.distcp (w) was changed"}),
    ]
    added = [
        Event(kind, "harness", 10_000 + n, 0.0, after.mono_s + n / 1e4, data={"fault": "damage", **data})
        for n, (kind, data) in enumerate(new)
    ]
    return replace(made, events=tuple(sorted([*made.events, *added], key=lambda event: event.mono_s)))


@pytest.mark.parametrize(
    ("builds_on", "loads", "damage", "work"),
    [
        (CHAIN, 10, "passed", "passed"),
        (ASIDE, 10, "passed", "passed"),
        (CHAIN, 5, "failed", "failed"),  # step 10 was whole
        (CHAIN, 20, "failed", "passed"),  # it builds upon the damaged one
        (GONE, 10, "passed", "inconclusive"),
        (WHOLE, 10, "failed", "failed"),  # step 20 was whole, since it builds upon nothing
        (WHOLE, 20, "passed", "passed"),
    ],
)
def test_a_delta_is_as_good_as_what_it_builds_upon(
    trainer: Any, builds_on: dict[str, list[str]], loads: int, damage: str, work: str
) -> None:
    """A job goes back to before a damaged link, and no further; one that loads a later delta has loaded the damage."""
    run = _with_deltas(trainer, loads, builds_on)
    finding = _judge(run)
    assert finding.outcome.value == damage, finding.reason
    assert NoLostWork().judge(run, []).outcome.value == work, NoLostWork().judge(run, []).reason
    assert bool(damage_reaction.felt(run, "damage")) == (builds_on is not WHOLE or loads != 20)
    through = "attempt 1 loaded step-20, which builds upon step-15 (step 15), in which step-15/"
    assert (through in finding.reason) == (builds_on is CHAIN and loads == 20)


def test_a_checkpoint_that_the_fault_damaged_is_not_called_complete(trainer: Any) -> None:
    """The job went on from it all the same, so no step was lost; after another fault it is called complete."""
    run = _record(trainer)
    unhurt = replace(run, events=tuple(event for event in run.events if event.data.get("what") != "damaged"))
    newest = [NoLostWork().judge(one, []).reason for one in (run, unhurt)]
    assert ["went on from step 15, whose checkpoint the fault had damaged" in reason for reason in newest] == [1, 0]
    assert "the newest complete checkpoint" in newest[1]


@pytest.mark.parametrize("op", ["write", "text"])
def test_fell_back_too_far(trainer: Any, op: str) -> None:
    """Steps that a newer whole checkpoint would have kept are lost work; also when only the tracker was stale."""
    finding = _judge(_record(trainer, back=2, op=op))
    assert finding.outcome is Outcome.FAILED
    best, lost = (15, 10) if op == "text" else (10, 5)
    assert finding.reason == (
        f"attempt 1 went back to step 5, although the checkpoint of step {best} (step-{best}) was whole: {lost} steps "
        "were lost needlessly"
    )


def test_a_stale_tracker_that_the_job_saw_through_was_felt(trainer: Any) -> None:
    """It went on from the newest checkpoint though the tracker named another: nothing is lost, and it was felt."""
    record = _record(trainer, op="text")
    assert _judge(record).outcome is Outcome.PASSED
    evidence = damage_reaction.felt(record, "damage")
    assert evidence
    assert "went on from the newest checkpoint anyway" in evidence.what


def test_what_is_loaded_after_the_first_step_is_no_resume(trainer: Any) -> None:
    """It fell back to a whole checkpoint, and looked into the damaged one later: no step is built on that."""
    made = _record(trainer, back=1)
    loaded = next(e for e in made.events if e.kind is Kind.LOAD_END and e.attempt == 1)
    step = next(e for e in made.events if e.kind is Kind.STEP and (e.attempt, e.rank, e.step) == (1, 0, 3))
    late = replace(
        loaded, data={**loaded.data, "path": f"{ROOT}/step-15"}, mono_s=step.mono_s + 1e-4, step=3, seq=30_000
    )
    events = tuple(sorted((*made.events, late), key=lambda event: event.mono_s))
    assert _judge(replace(made, events=events)).outcome is Outcome.PASSED
    assert [one.did for one in damage_reaction.meetings(replace(made, events=events))] == [Did.FELL_BACK]


def test_a_file_that_was_damaged_under_another_name_is_found(trainer: Any) -> None:
    """Damaged while it was saved, it got its final name from the job afterwards; that is what was loaded."""
    made, folder = _record(trainer), f"{ROOT}/half-written"
    damaged = next(e for e in made.events if e.data.get("what") == "damaged")
    about = {"file": f"{folder}/__0_0.distcp", "checkpoint": folder, "step": None}
    moved = {"what": "renamed", "effect": "renamed", "file": about["file"], "to": f"{ROOT}/step-15/__0_0.distcp"}
    for fault, outcome in (("damage", Outcome.FAILED), ("another", Outcome.PASSED)):
        new = [
            replace(damaged, data={**damaged.data, **about}),
            replace(damaged, seq=20_000, mono_s=damaged.mono_s + 1e-4, data={**moved, "fault": fault}),
        ]
        events = (*(e for e in made.events if e is not damaged), *new)
        finding = _judge(replace(made, events=tuple(sorted(events, key=lambda event: event.mono_s))))
        assert finding.outcome is outcome, finding.reason


@pytest.mark.parametrize(("other", "step", "outcome"), [("step-15", 15, "passed"), ("step-14", 14, "failed")])
def test_a_checkpoint_of_several_files_is_not_whole_without_one_of_them(
    trainer: Any, other: str, step: int, outcome: str
) -> None:
    """Where each file was taken for a checkpoint, none of one folder is whole alone. A file of another folder is."""
    made, file = _record(trainer, back=1), f"{ROOT}/step-15/sparse.pt"
    there = [{"path": file, "step": 15}, {"path": f"{ROOT}/{other}/dense.pt", "step": step}]
    new: dict[str, dict[str, Any]] = {
        "survey": {"checkpoints": there},
        "damaged": {"file": file, "checkpoint": file, "step": 15},
    }
    events = [replace(e, data={**e.data, **new.get(str(e.data.get("what")), {})}) for e in made.events]
    assert _judge(replace(made, events=tuple(events))).outcome.value == outcome


@pytest.mark.parametrize(
    ("copy", "outcome"), [({"w": "w30"}, "failed"), ({"w": "another"}, "passed"), ({"v": "v30"}, "passed")]
)
def test_a_second_copy_in_the_same_folder_is_no_part(trainer: Any, copy: dict[str, str], outcome: str) -> None:
    """`ckpt-15.bak.pt`, which holds what `ckpt-15.pt` holds as later ones of their names show, is whole alone, and was
    passed over. Other tensors beside it, or other values under the same names (an average), are parts."""
    made = _record(trainer, back=1)
    file, other = f"{ROOT}/ckpt-15.pt", f"{ROOT}/ckpt-15.bak.pt"
    new: dict[str, dict[str, Any]] = {
        "survey": {"checkpoints": [{"path": path, "step": 15} for path in (file, other)]},
        "damaged": {"file": file, "checkpoint": file, "step": 15},
    }
    events = [replace(e, data={**e.data, **new.get(str(e.data.get("what")), {})}) for e in made.events]
    events = [one for event in events for one in _in_files(event)]
    about = {"format": "torch", "step": 30, "complete": True, "loadable": True, "problem": None, "values": {}}
    tensors = {"ckpt-30.pt": {"w": "w30"}, "ckpt-30.bak.pt": copy}
    inventory = {"root": ROOT, "checkpoints": [{**about, "path": path, "tensors": tensors[path]} for path in tensors]}
    run = replace(made, events=tuple(events), artifacts={**made.artifacts, "inventory": inventory})
    assert [one.damage.checkpoint for one in damage_reaction.meetings(run)] == [file]
    assert _judge(run).outcome.value == outcome, _judge(run).reason


def _in_files(event: Event) -> list[Event]:
    """Each checkpoint as a file, and all that is saved a second time beside it."""
    if event.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_END):
        return [event]
    file = str(event.data["path"]).replace("step-", "ckpt-")
    both = (".pt",) if event.kind is Kind.LOAD_END else (".pt", ".bak.pt")
    return [replace(event, data={**event.data, "path": f"{file}{end}"}) for end in both]


def test_never_came_back(trainer: Any) -> None:
    """A job that ends over the damage did not resume, though an older checkpoint was whole."""
    made = _record(trainer)
    dead = replace(
        made, events=tuple(e for e in made.events if not (e.attempt == 1 and e.kind in (Kind.STEP, Kind.LOAD_END)))
    )
    finding = _judge(dead)
    assert finding.outcome is Outcome.FAILED
    assert finding.reason == (
        "the job did not resume: in step-15 (step 15) step-15/__0_0.distcp (w) was changed at byte 7, and 1 attempt "
        "ended without a step; step-10 (step 10) was whole"
    )


def test_loads_that_were_not_seen(trainer: Any) -> None:
    """The step that it went on from tells, where the agent saw no load."""
    assert _judge(_record(trainer, loads_seen=False)).outcome is Outcome.FAILED
    assert _judge(_record(trainer, back=1, loads_seen=False)).outcome is Outcome.PASSED


def test_another_checkpoint_of_the_same_step(trainer: Any) -> None:
    """Lightning writes two of each step: a job that takes the whole one of them did not load the damaged one."""
    made = _record(trainer)
    twin = [
        replace(event, data={**event.data, "path": f"{ROOT}/epoch=0-step=15.ckpt"})
        if event.kind is Kind.LOAD_END
        else event
        for event in made.events
    ]
    finding = _judge(replace(made, events=tuple(twin)))
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_nobody_knows_from_where(trainer: Any) -> None:
    """No load, no counter, no sample, no loss: it can't be told, and is not passed."""
    blind: dict[str, Any] = {"loads_seen": False, "counters_seen": False, "samples_seen": False, "losses_seen": False}
    record = _record(trainer, **blind)
    assert _judge(record).outcome is Outcome.INCONCLUSIVE
    assert damage_reaction.felt(record, "damage") is None


def test_permissions_that_did_not_hinder(trainer: Any) -> None:
    """Reading worked all the same, as it does for root: nothing was felt, and the data is not damaged."""
    record = _record(trainer, op="mode")
    assert damage_reaction.felt(record, "damage") is None
    assert _judge(record).outcome is Outcome.PASSED


def test_what_was_replaced_before_is_no_harm(trainer: Any) -> None:
    """The damaged file was gone when the attempt resumed: what it loaded was another one."""
    record = _record(trainer, until="gone")
    assert damage_reaction.meetings(record) == []
    assert _judge(record).outcome is Outcome.PASSED


def test_damage_that_nobody_came_upon(trainer: Any) -> None:
    """Without a restart the damage is never met, and never felt."""
    made = trainer().record(inventory=_inventory())
    at = made.events[len(made.events) // 2].mono_s
    path = f"{ROOT}/step-5"
    about = {"file": f"{path}/x", "checkpoint": path, "step": 5, "op": "write"}
    data = {"fault": "damage", "what": "damaged", "effect": "", **about}
    record = replace(made, events=(*made.events, Event(Kind.EFFECT, "harness", 9999, 0.0, at, data=data)))
    assert damage_reaction.felt(record, "damage") is None
