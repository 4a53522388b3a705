"""checkpoint_integrity: checkpoints must be complete, loadable, of the right step, and equal to the twin's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.checkpoint_integrity import CheckpointIntegrity
from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of
from torchaos.harness.analysis.checkpointing.resume_points import pairs
from torchaos.harness.analysis.comparison.agreement import wants_more
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Finding, Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import PlannedJob
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Verdict

KILL = [(18, 1)]
STEPS = (5, 10, 15, 20, 25, 30)


def _one(step: int, **other: Any) -> dict[str, Any]:
    return {
        "path": f"step-{step}", "format": "dcp", "step": step, "complete": True, "loadable": True, "problem": None,
        "tensors": {"model.weight": f"w{step}", "ema.weight": f"e{step}"}, "values": {"step": str(step)}, "bytes": 10,
        **other,
    }  # fmt: skip


def _inventory(*changed: dict[str, Any], steps: tuple[int, ...] = STEPS) -> dict[str, Any]:
    own = {one["path"]: one for one in changed}
    ones = [own.pop(f"step-{step}", _one(step)) for step in steps]
    return {"root": "/job/checkpoints", "checkpoints": [*ones, *own.values()]}


def _judge(trainer: Any, ours: dict[str, Any], *theirs: dict[str, Any], **how: Any) -> Finding:
    run = trainer(**{"kills": KILL, **how}).record(inventory=ours)
    return CheckpointIntegrity().judge(run, [trainer().record(inventory=other) for other in theirs])


def test_files_that_are_not_read_are_compared_by_their_bytes(trainer: Any) -> None:
    """A replay buffer in .npz that was not restored is in no tensor that is read. What differs before the fault too, or
    between twins, holds a time; and what the scenario ignores may differ."""

    def files(digests: dict[int, str], name: str = "replay.npz") -> dict[str, Any]:
        return _inventory(
            *(_one(step, unread_files={name: digest}, unread=[".npz"]) for step, digest in digests.items())
        )

    usual = {step: f"n{step}" for step in STEPS}
    last = max(STEPS)
    other, always = {**usual, last: "other"}, {step: f"t{step}" for step in STEPS}
    same = _judge(trainer, files(usual), files(usual))
    assert same.outcome is Outcome.PASSED
    assert "their files of the type .npz are not read" in same.reason
    lost = _judge(trainer, files(other), files(usual))
    assert lost.outcome is Outcome.INCONCLUSIVE
    assert f"replay.npz in step-{last} (step {last}) has other bytes than the twin's" in lost.reason
    assert _judge(trainer, files(always), files(usual)).outcome is Outcome.PASSED
    gone = _inventory(*(_one(step, unread_files={} if step == last else {"replay.npz": usual[step]}) for step in STEPS))
    assert _judge(trainer, gone, files(usual)).outcome is Outcome.INCONCLUSIVE
    assert _judge(trainer, files(usual, "log-12.npz"), files(usual, "log-345.npz")).outcome is Outcome.PASSED
    assert _judge(trainer, files(other), files(usual), files(always)).outcome is Outcome.PASSED
    run = trainer(kills=KILL).record(inventory=files(other))
    twins = [trainer().record(inventory=files(usual))]
    assert CheckpointIntegrity(ignore=["*.npz"]).judge(run, twins).outcome is Outcome.PASSED


def test_whole_and_equal_checkpoints_pass(trainer: Any) -> None:
    """Six checkpoints that are those of the twin; without a twin the reason says what can't be seen."""
    assert isinstance(CheckpointIntegrity(), Assertion)
    finding = _judge(trainer, _inventory(), _inventory())
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert finding.measured == {"checkpoints": 6, "compared": 6, "entries": 3}
    alone = _judge(trainer, _inventory())
    assert (alone.outcome, "without a twin" in alone.reason) == (Outcome.PASSED, True)


def test_a_checkpoint_that_is_marked_complete_must_load(trainer: Any) -> None:
    """Even an old one: whoever falls back to it is lost."""
    finding = _judge(trainer, _inventory(_one(10, loadable=False, problem="crc of weight")), _inventory())
    assert finding.outcome is Outcome.FAILED
    assert finding.reason == "step-10 (step 10) is marked as complete but does not load: crc of weight"


def test_data_in_the_folder_of_the_checkpoints_is_no_checkpoint(trainer: Any) -> None:
    """A shard of a dataset that ends in .bin is left out. A torn file of that name is failed, and so is one with a
    step."""
    problem = {"kind": "unreadable", "text": "its pickle can't be read"}

    def judged(**more: Any) -> Outcome:
        shard: dict[str, Any] = {
            "path": "chunks/chunk-0-0.bin", "format": "torch", "step": None, "loadable": False, "tensors": {},
            "values": {}, "problem": "it can't be read", "problems": [problem],
        }  # fmt: skip
        return _judge(trainer, _inventory({**_one(0), **shard, **more}), _inventory()).outcome

    assert judged() is Outcome.PASSED
    assert judged(problems=[{**problem, "kind": "torn"}]) is Outcome.FAILED
    assert judged(step=30) is Outcome.FAILED


def test_a_delta_of_another_base_is_not_compared(trainer: Any) -> None:
    """After a restart, a job begins a new chain: what has changed since another checkpoint are other entries. A delta
    of the same base must be equal."""
    delta = _one(10, tensors={"w": "other"}, builds_on=["step-5"])
    twins = _inventory(_one(10, builds_on=["step-5", "step-0"]))
    finding = _judge(trainer, _inventory(delta), twins)
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "those of 1 more were not compared: they build upon others than the twin's" in finding.reason
    assert _judge(trainer, _inventory(delta), _inventory(_one(10, builds_on=["step-5"]))).outcome is Outcome.FAILED


def test_damage_that_loads_is_failed(trainer: Any) -> None:
    """A wrong check sum is a flipped bit, whether or not the loader minds."""
    finding = _judge(trainer, _inventory(_one(10, problem="crc of weight")), _inventory())
    assert finding.outcome is Outcome.FAILED
    assert finding.reason == "step-10 (step 10) loads, but is damaged: crc of weight"


def test_what_only_a_pickle_opens_is_inconclusive(trainer: Any) -> None:
    """No code of a checkpoint is run to look into it, and what was not looked at is not judged."""
    closed = _one(10, tensors={}, values={}, unopened=["model.pt"], loadable=False, problem="not opened: needs pickle")
    finding = _judge(trainer, _inventory(closed), _inventory())
    assert (finding.outcome, "can't be read without running" in finding.reason) == (Outcome.INCONCLUSIVE, True)


@pytest.mark.parametrize(
    ("to", "ok", "outcome"),
    [
        ("step-10", False, "failed"),
        ("step-10", True, "passed"),
        ("step-10.bad", False, "passed"),
        ("", False, "passed"),
    ],
)
def test_a_failed_save_that_is_given_the_name_of_a_whole_one(trainer: Any, to: str, ok: bool, outcome: str) -> None:
    """The next resume would take it. Not so one whose save went well and that was taken apart since, one that is put
    aside under another name, and one that had its name from the start: the file that is written last is not there."""
    path = to or "step-10"
    torn = _one(10, path=path, complete=False, loadable=False, problem="no metadata")
    run = trainer(kills=KILL).record(inventory=_inventory(torn, steps=(5, 15, 20, 25, 30)))
    events = [
        replace(one, data={**one.data, "path": f"/job/checkpoints/{'work' if to else path}", "ok": ok})
        if str(one.data.get("path")).endswith("step-10") and one.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END) else one
        for one in run.events
    ]  # fmt: skip
    saved = next(
        one for one in reversed(events) if one.data.get("path") in (f"/job/checkpoints/{path}", "/job/checkpoints/work")
    )
    names = {"path": "/job/checkpoints/work", "to": f"/job/checkpoints/{to}"}
    renamed = [replace(saved, kind=Kind.RENAMED, seq=9999, mono_s=saved.mono_s + 0.001, data=names)] if to else []
    run = replace(run, events=tuple(sorted([*events, *renamed], key=lambda one: one.mono_s)))
    finding = CheckpointIntegrity().judge(run, [])
    assert finding.outcome.value == outcome, finding.reason
    assert ("could not be saved" in finding.reason) == (outcome == "failed")


def test_a_torn_leftover_is_borne_with_only_when_superseded(trainer: Any) -> None:
    """What the killed attempt left half written is no harm once a later one is whole; the newest must be whole."""
    torn = _one(18, path=".step-18.tmp", complete=False, loadable=False, problem="no metadata")
    finding = _judge(trainer, _inventory(torn), _inventory())
    assert (finding.outcome, "1 torn and superseded: .step-18.tmp" in finding.reason) == (Outcome.PASSED, True)
    alone = _judge(trainer, _inventory(torn))
    assert (alone.outcome, alone.measured) == (Outcome.PASSED, {"checkpoints": 7, "torn": 1})
    newest = _judge(trainer, _inventory(_one(30, complete=False, loadable=False, problem="no metadata")), _inventory())
    assert (newest.outcome, "the newest checkpoint, step-30 (step 30), is torn" in newest.reason) == (
        Outcome.FAILED,
        True,
    )


def test_a_torn_leftover_of_no_known_step_is_superseded_by_any(trainer: Any) -> None:
    """Which step it was of nobody can tell, and a whole one is there to resume from."""
    torn = {**_one(0), "path": ".tmp", "step": None, "complete": False, "loadable": False, "problem": "no metadata"}
    assert _judge(trainer, _inventory(torn), _inventory()).outcome is Outcome.PASSED
    alone = _judge(trainer, _inventory(torn, steps=()), _inventory())
    assert (alone.outcome, "is torn" in alone.reason) == (Outcome.FAILED, True), alone.reason


def test_no_checkpoint_and_no_inventory(trainer: Any) -> None:
    """None on disk fails where the twin has some: a job may remove them at its end, or write files that are not read.
    Not having looked is inconclusive."""
    none = {"root": "/job/checkpoints", "checkpoints": [], "unread": [".npz"]}
    assert _judge(trainer, none, _inventory()).outcome is Outcome.FAILED
    for theirs in ([none], []):
        finding = _judge(trainer, none, *theirs)
        assert (finding.outcome, ".npz are there, and are not read" in finding.reason) == (Outcome.INCONCLUSIVE, True)
    assert CheckpointIntegrity().judge(trainer().record(), []).outcome is Outcome.INCONCLUSIVE
    unread = _judge(trainer, {**_inventory(), "problem": "not read within 300 s"}, _inventory())
    assert (unread.outcome, "not read within 300 s" in unread.reason) == (Outcome.INCONCLUSIVE, True)


def test_files_that_are_not_read_are_counted_beside_the_others(trainer: Any) -> None:
    """A verdict about two checkpoints is not one about the archives beside them. Old inventories have no number."""
    for unread, words in (({".tar": 3}, "(3 files of the type .tar are there, and are not read)"),
                          ([".tar"], "(files of the type .tar are there, and are not read)")):  # fmt: skip
        finding = _judge(trainer, {**_inventory(), "unread": unread}, _inventory())
        assert (finding.outcome, words in finding.reason) == (Outcome.PASSED, True), finding.reason


def test_the_newest_must_be_of_the_right_step(trainer: Any) -> None:
    """Older than the twin's, or than the last that was seen saved."""
    finding = _judge(trainer, _inventory(steps=STEPS[:-1]), _inventory())
    assert finding.outcome is Outcome.FAILED
    assert "is of step 25, although a checkpoint was saved after step 30" in finding.reason
    short = _judge(trainer, _inventory(steps=STEPS[:-1]), _inventory(), steps=25)
    assert (short.outcome, "is of step 25, the twin's of step 30" in short.reason) == (Outcome.FAILED, True)


def test_one_checkpoint_more_than_the_twin_is_no_damage(trainer: Any) -> None:
    """Some trainers save once more where they were resumed. That one can't be compared; another since the resume can,
    or nothing is known of what came after. One beyond the twin's last step is of a job that trained too long."""
    last = _one(30, tensors={"model.weight": "anything"})
    ours = _inventory(last)
    found = _judge(trainer, ours, _inventory(steps=STEPS[:-1]))
    assert (found.outcome, "step-30 (step 30) is not in the twin" in found.reason) == (Outcome.PASSED, True)
    assert found.measured["compared"] == 5
    old = _judge(trainer, ours, _inventory(steps=(5, 10, 15)))
    assert old.outcome is Outcome.INCONCLUSIVE, old.reason
    long = _judge(trainer, {**ours, "checkpoints": [*ours["checkpoints"], _one(35)]}, _inventory(), steps=35)
    assert (long.outcome, "is of step 35, the twin's of step 30" in long.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"tensors": {"model.weight": "w20", "ema.weight": "lost"}},
            "the tensor ema.weight in step-20 (step 20) differs",
        ),
        ({"tensors": {"model.weight": "w20"}}, "the tensor ema.weight is missing in step-20"),
        ({"values": {"step": "3"}}, "the value step in step-20 (step 20) differs from the twin's: 3 instead of 20"),
    ],
)
def test_other_contents_fail_by_name(trainer: Any, changed: dict[str, Any], words: str) -> None:
    """A lost EMA shows in no loss, only here; so does any tensor or value."""
    finding = _judge(trainer, _inventory(_one(20, **changed)), _inventory())
    assert (finding.outcome, words in finding.reason) == (Outcome.FAILED, True), finding.reason
    assert "it is state that no loss shows" in finding.reason
    assert finding.measured["step"] == 20


@pytest.mark.parametrize("changed", [{"tensors": {"model.weight": "w20"}}, {"values": {"step": "3"}}])
def test_losses_that_nobody_recorded_agree_with_nothing(trainer: Any, changed: dict[str, Any]) -> None:
    """A scenario without loss_continuity records none, and a reader would look for the defect in the wrong place."""
    finding = _judge(trainer, _inventory(_one(20, **changed)), _inventory(), losses_seen=False)
    assert "No losses were recorded" in finding.reason
    assert "agree" not in finding.reason
    assert "no loss shows" not in finding.reason


def test_losses_of_steps_that_are_not_known_agree_with_nothing(trainer: Any) -> None:
    """If it is not known which steps an attempt made, its losses were compared with none."""
    ours = _inventory(_one(30, tensors={"model.weight": "other", "ema.weight": "e30"}))
    blind = {f"{name}_seen": False for name in ("loads", "counters", "samples")}
    run = trainer(kills=KILL, off=1e-3, **blind).record(inventory=ours)
    assert run.history.unplaced
    finding = CheckpointIntegrity().judge(run, [trainer().record(inventory=_inventory())])
    assert (finding.outcome, "model.weight in step-30" in finding.reason) == (Outcome.FAILED, True), finding.reason
    assert "Whether the losses agree is not clear" in finding.reason


def test_a_checkpoint_under_another_name_is_the_one_that_holds_the_same(trainer: Any) -> None:
    """A trainer that finds its usual name taken writes beside it: more than half of the entries have to be in both."""
    names = [f"layer{number}" for number in range(5)]
    theirs = dict.fromkeys(names, "x")  # and the value `step`, which both have
    for shared, paired in ((5, True), (3, True), (2, False)):
        ours = {name if place < shared else f"other-{name}": "x" for place, name in enumerate(names)}
        kept, new = _one(20, tensors=theirs), {**_one(20, tensors=ours), "path": "step-20-v1"}
        run = trainer().record(inventory=_inventory(new, steps=(5, 10, 15)))
        twin = trainer().record(inventory=_inventory(kept, steps=(5, 10, 15, 20)))
        found = pairs(checkpoints_of(run) or [], checkpoints_of(twin) or [])
        assert (("step-20-v1", "step-20") in [(one.path, other.path) for one, other in found]) is paired
        assert len(found) == 3 + paired


def _random_names(scheme: str, names: str, *contents: str) -> dict[str, Any]:
    """The inventory of one checkpoint of step 30, in which each rank has a file of its own below random names."""
    return _inventory(
        *(
            _one(30, path=scheme.format(names[rank] * 8, rank), tensors=dict.fromkeys("ab", each))
            for rank, each in enumerate(contents)
        ),
        steps=(),
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["{0}/state-r{1}.pt", "rank{1}/{0}.pt", "{0}-r{1}.pt", "r{1}-{0}/a.pt", "{0}.pt"])
def test_files_of_ranks_below_random_names_are_compared_rank_by_rank(trainer: Any, scheme: str) -> None:
    """Each run draws other names, so that the order of the files says nothing. A file is compared with that of its
    rank; if one is wrong, this is found, too; so is a file of another rank in the place of a rank's own."""
    theirs = _random_names(scheme, "ac", "zero", "one")
    for names in ("bd", "db"):
        well = _judge(trainer, _random_names(scheme, names, "zero", "one"), theirs)
        assert (well.outcome, well.measured["compared"]) == (Outcome.PASSED, 2), well.reason
        for contents in (("zero", "lost"), ("zero", "zero"), *([("one", "zero")] if "{1}" in scheme else [])):
            wrong = _judge(trainer, _random_names(scheme, names, *contents), theirs)
            assert (wrong.outcome, "differs from the twin's" in wrong.reason) == (Outcome.FAILED, True), wrong.reason


def test_no_difference_is_claimed_if_several_files_may_be_the_same(trainer: Any) -> None:
    """Random names that say nothing of the rank, and contents that are nobody's: neither a difference nor a missing
    checkpoint is claimed. One that is the twin's is still compared."""
    theirs = _random_names("{0}.pt", "ac", "zero", "one")
    unclear = _judge(trainer, _random_names("{0}.pt", "bd", "lost", "wrong"), theirs)
    assert (unclear.outcome, "nothing shows with which one" in unclear.reason) == (Outcome.INCONCLUSIVE, True)
    assert "missing" not in unclear.reason


def test_what_differs_between_twins_is_known_below_random_names(trainer: Any) -> None:
    """What twins differ in is learned for the same file, whatever it is called in each of them."""

    def made(names: str, seconds: str) -> dict[str, Any]:
        other = {"step": "30", "took": seconds}
        return _inventory(
            *(_one(30, path=f"{name * 8}/r{rank}.pt", values=other) for rank, name in enumerate(names)), steps=()
        )

    finding = _judge(trainer, made("bd", "1.5"), made("ca", "2.5"), made("ef", "3.5"))
    assert finding.outcome is Outcome.PASSED, finding.reason


@pytest.mark.parametrize(
    ("own", "outcome"),
    [
        ((20, 30), Outcome.PASSED),
        ((30, 30), Outcome.FAILED),
        ((30, 15), Outcome.FAILED),
    ],
    ids=["change places", "overwrites the newest", "loses a save"],
)
def test_two_files_in_turn_may_change_places(trainer: Any, own: tuple[int, int], outcome: Outcome) -> None:
    """A job that writes a.pt and b.pt in turn begins with the other file after a restart. The two may change places
    with the twin's, and neither may be of another step."""

    def slots(*steps: int) -> dict[str, Any]:
        return _inventory(
            *(_one(step, path=name) for name, step in zip(("a.pt", "b.pt"), steps, strict=True)), steps=()
        )

    finding = _judge(trainer, slots(*own), slots(30, 20))
    assert finding.outcome is outcome, finding.reason
    if outcome is Outcome.PASSED:
        other = _one(20, path="a.pt", tensors={"model.weight": "other", "ema.weight": "e20"})
        changed = _inventory(other, _one(30, path="b.pt"), steps=())
        assert "model.weight in a.pt (step 20) differs" in _judge(trainer, changed, slots(30, 20)).reason


def test_entries_in_which_twins_differ_are_not_compared(trainer: Any) -> None:
    """A clock is told from a loss by a second twin; one twin alone can't tell."""
    ours = _inventory(_one(20, values={"step": "20", "saved_time": "1.5"}))
    first, second = (_inventory(_one(20, values={"step": "20", "saved_time": t})) for t in ("2.5", "3.5"))
    two = _judge(trainer, ours, first, second)
    assert two.outcome is Outcome.PASSED, two.reason
    assert "except 1 entry in which the twins differ" in two.reason
    assert _judge(trainer, ours, first).outcome is Outcome.INCONCLUSIVE
    run, twin = trainer(kills=KILL).record(inventory=ours), trainer().record(inventory=first)
    assert wants_more(run, [twin])


def test_contents_that_follow_the_loss_are_told_from_those_that_do_not(trainer: Any) -> None:
    """When the loss had differed before, the checkpoint only shows it once more."""
    ours = _inventory(_one(20, tensors={"model.weight": "other", "ema.weight": "e20"}))
    finding = _judge(trainer, ours, _inventory(), broken=frozenset({"rng"}))
    assert (finding.outcome, "so the job had left the twin's path before" in finding.reason) == (Outcome.FAILED, True)


def test_a_twin_of_another_path_is_no_measure(trainer: Any) -> None:
    """When the losses differed before the fault, other contents show nothing."""
    finding = _judge(trainer, _inventory(_one(20, values={"step": "3"})), _inventory(), seed=8)
    assert (finding.outcome, "can't be compared" in finding.reason) == (Outcome.INCONCLUSIVE, True)


def test_the_step_is_that_of_the_save_whatever_the_name(trainer: Any) -> None:
    """The run's own record of the saving goes before what the checkpoint says of itself."""
    run = trainer().record(inventory=_inventory({**_one(20), "step": 99}))
    found = checkpoints_of(run)
    assert found is not None
    assert [one.step for one in found] == list(STEPS)


def test_a_model_saved_elsewhere_is_no_checkpoint(trainer: Any) -> None:
    """The finished model goes to a folder of its own, later than the last checkpoint: nothing is too old by that."""
    run = trainer(kills=KILL, steps=33).record(inventory=_inventory())
    last = next(e for e in reversed(run.events) if e.kind is Kind.SAVE_END)
    step = next(e for e in reversed(run.events) if e.kind is Kind.STEP)
    data = {**last.data, "path": "/job/model.pt"}
    export = replace(last, mono_s=step.mono_s + 0.001, step=step.step, attempt=step.attempt, data=data)
    finding = CheckpointIntegrity().judge(replace(run, events=(*run.events, export)), [])
    assert finding.outcome is Outcome.PASSED, finding.reason


def test_contents_of_another_number_of_ranks_are_not_compared(trainer: Any) -> None:
    """After the job shrank sums come in another order: what was saved before is compared, and the rest is named."""
    shrunk = _inventory(_one(20, tensors={"model.weight": "rounded"}), _one(25, tensors={"model.weight": "rounded"}))
    finding = _judge(trainer, shrunk, _inventory(), worlds={1: 1}, global_batch=True)
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "those of 3 more were not compared: they were saved on another number of ranks" in finding.reason
    before = _inventory(_one(15, tensors={"model.weight": "other"}))
    assert _judge(trainer, before, _inventory(), worlds={1: 1}, global_batch=True).outcome is Outcome.FAILED
    late = [_inventory(steps=(20, 25, 30)), _inventory(steps=(20, 25, 30))]
    assert _judge(trainer, *late, worlds={1: 1}, global_batch=True).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("inventory", [[], "x", {"checkpoints": None}, {"checkpoints": [{}]}, {"checkpoints": ["x"]}])
def test_a_damaged_inventory_is_none(trainer: Any, inventory: Any) -> None:
    """One of the wrong shape says nothing of any checkpoint: inconclusive, also where a rank aborted at its exit."""
    run = trainer(kills=KILL).record(inventory=inventory)
    events = tuple(
        replace(e, data={**e.data, "exit_code": -6}) if e.kind is Kind.RANK_EXITED and e.rank == 1 else e
        for e in run.events
    )
    aborted = replace(run, events=events)
    assert checkpoints_of(aborted) is None
    assert (
        CheckpointIntegrity().judge(aborted, [trainer().record(inventory=_inventory())]).outcome is Outcome.INCONCLUSIVE
    )
    assert verdict_of(aborted, [], "x").verdict is Verdict.INCONCLUSIVE


def _flat(*steps: int, kinds: tuple[str, ...] = ("model", "ema")) -> list[dict[str, Any]]:
    return [_one(step, path=f"{kind}-step-{step}.pt") for step in steps for kind in kinds]


def _listing(*ones: dict[str, Any]) -> dict[str, Any]:
    return {"root": "/job/checkpoints", "checkpoints": list(ones)}


def test_what_the_twin_has_and_the_run_lacks_is_failed(trainer: Any) -> None:
    """Nobody saves the EMA any more after the restart: the model's files equal the twin's, and that is not all."""
    ours = _listing(*_flat(5, 10, 15), *_flat(20, 25, 30, kinds=("model",)))
    finding = _judge(trainer, ours, _listing(*_flat(*STEPS)))
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert (
        "ema-step-20.pt (step 20) is missing, and the twin has it, and there are 2 other differences" in finding.reason
    )


def test_a_checkpoint_that_the_run_removed_is_said_to_be_removed(trainer: Any) -> None:
    """It was saved in time, and a resumed attempt cleaned up too much: no state that was lost decided what is saved."""
    run = trainer(kills=KILL).record(inventory=_listing(*map(_one, (5, 15, 20, 25, 30))))
    then = next(e for e in run.events if e.attempt == 1 and e.kind is Kind.STEP)
    gone = replace(then, kind=Kind.REMOVED, seq=9_999, data={"path": "/job/checkpoints/step-10"})
    twin = trainer().record(inventory=_listing(*map(_one, STEPS)))
    found = CheckpointIntegrity().judge(replace(run, events=(*run.events, gone)), [twin])
    assert found.outcome is Outcome.FAILED, found.reason
    assert "is missing, and the twin has it: attempt 0 had saved it, and attempt 1 removed it" in found.reason


@pytest.mark.parametrize(("by", "outcome"), [(0, Outcome.PASSED), (1, Outcome.INCONCLUSIVE)])
def test_a_folder_for_each_start_has_its_own_newest_file(trainer: Any, by: int, outcome: Outcome) -> None:
    """The first attempt's last.pt stays where it was, and the second attempt writes its own in a new folder. It is
    compared with the twin's; the file of another rank is not."""

    def one(start: int, step: int) -> dict[str, Any]:
        return {**_one(step), "path": f"version_{start}/last.pt"}

    run, events = trainer(kills=KILL).record(), list[Event]()
    for event in run.events:
        if event.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END):
            events.append(event)
        elif event.rank == (by if event.attempt else 0):
            path = f"/job/checkpoints/version_{event.attempt}/last.pt"
            events.append(replace(event, data={**event.data, "path": path}))
    inventory = _listing(one(0, 15), one(1, 30), _one(10))
    run = replace(run, events=tuple(events), artifacts={**run.artifacts, "inventory": inventory})
    found = CheckpointIntegrity().judge(run, [trainer().record(inventory=_listing(one(0, 30), _one(10)))])
    assert found.outcome is outcome, found.reason
    assert ("the contents of 2 equal the twin's" in found.reason) is (outcome is Outcome.PASSED)


def test_what_retention_removed_is_not_lacking(trainer: Any) -> None:
    """Both keep the last three; the run saved once more, where it was resumed, and so removed one more. With fewer
    newer ones than the twin keeps, nothing explains the gap."""
    run = _listing(*_flat(25, 28, 30))
    finding = _judge(trainer, run, _listing(*_flat(20, 25, 30)))
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "ema-step-28.pt (step 28), model-step-28.pt (step 28) are not in the twin" in finding.reason
    finding = _judge(trainer, _listing(*_flat(25, 30)), _listing(*_flat(20, 25, 30)))
    assert finding.outcome is Outcome.FAILED, finding.reason


def test_a_checkpoint_that_was_resumed_from_and_is_gone_is_lacking(trainer: Any) -> None:
    """A rotation that sorts names after the resume removes a newer checkpoint and keeps an older one. A file of the
    step of the resume that the job did not load may have been cut short by the fault."""
    ours, theirs = _listing(*_flat(10, 30)), _listing(*_flat(15, 30))
    for kind, outcome in (("model", Outcome.FAILED), ("optimizer", Outcome.PASSED)):
        run = trainer(kills=KILL).record(inventory=ours)
        loaded = tuple(
            replace(event, data={**event.data, "path": f"/job/checkpoints/{kind}-step-15.pt"})
            if event.kind in (Kind.LOAD_BEGIN, Kind.LOAD_END) else event
            for event in run.events
        )  # fmt: skip
        finding = CheckpointIntegrity().judge(replace(run, events=loaded), [trainer().record(inventory=theirs)])
        assert finding.outcome is outcome, finding.reason


def test_a_checkpoint_that_could_not_be_saved_is_not_lacking(trainer: Any) -> None:
    """The disk was full, the job went on, and a newer checkpoint is whole. A save that went well, and one that was cut
    short in an attempt whose steps do not count, explain nothing."""
    ours, theirs = _inventory(steps=(5, 10, 15, 25, 30)), _inventory()
    run = trainer(kills=KILL).record(inventory=ours)
    for attempt, outcome in ((1, Outcome.PASSED), (0, Outcome.FAILED)):
        events = tuple(
            replace(event, attempt=attempt, data={**event.data, "ok": False})
            if event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END) and event.data["path"].endswith("step-20") else event
            for event in run.events
        )  # fmt: skip
        finding = CheckpointIntegrity().judge(replace(run, events=events), [trainer().record(inventory=theirs)])
        assert finding.outcome is outcome, finding.reason
    assert _judge(trainer, ours, theirs).outcome is Outcome.FAILED


def test_a_worse_best_checkpoint_is_failed(trainer: Any) -> None:
    """best.pt is of a later step than the twin's: the best metric was not restored. Where three twins do not agree on
    the best step, that is no fault of the recovery, and where the losses are not the twin's, nobody can say."""
    best = [_one(step, path="best.pt") for step in (6, 12, 18)]
    ours, theirs = ([*_inventory()["checkpoints"], one] for one in (best[1], best[0]))
    finding = _judge(trainer, _listing(*ours), _listing(*theirs))
    assert finding.outcome is Outcome.FAILED, finding.reason
    assert "best.pt is of step 12, and the twin's of step 6" in finding.reason
    other = _listing(*_inventory()["checkpoints"], best[2])
    assert _judge(trainer, _listing(*ours), _listing(*theirs), other).outcome is Outcome.PASSED
    wobbly = _judge(trainer, _listing(*ours), _listing(*theirs), broken=frozenset({"rng"}))
    assert wobbly.outcome is Outcome.INCONCLUSIVE, wobbly.reason


def _sized(step: int, norm: float, *sums: float, digest: str) -> dict[str, Any]:
    tensors = {"model.weight": f"w{step}", "model.mean": digest}
    return _one(step, tensors=tensors, sketches={"model.mean": [1, norm, *sums]})


def test_noise_of_an_entry_is_a_size_and_no_name(trainer: Any) -> None:
    """Twins that differ in the last bit of a buffer excuse another last bit, and no buffer of zeros."""
    twins = [_inventory(_sized(20, 1.0, 0.5, -0.5 + 1e-7 * n, digest=f"m{n}")) for n in range(3)]
    near = _judge(trainer, _inventory(_sized(20, 1.0, 0.5, -0.5 + 3e-7, digest="near")), *twins)
    assert near.outcome is Outcome.PASSED, near.reason
    assert "except model.mean, at most 2e-07 apart, as far as the twins are" in near.reason
    equal = [_one(20, tensors={**one["tensors"], "ema": "e"}, sketches={**one["sketches"], "ema": [1, 1.0, 0.5, 0.5]})
             for one in (_sized(20, 1.0, 0.5, -0.5 + 1e-7 * n, digest=f"m{n}") for n in range(3))]  # fmt: skip
    tensors, sketches = {**equal[0]["tensors"], "ema": "f"}, {**equal[0]["sketches"], "ema": [1, 1.0, 0.5, 0.5 + 5e-8]}
    bit = _judge(trainer, _inventory(_one(20, tensors=tensors, sketches=sketches)), *map(_inventory, equal))
    assert bit.outcome is Outcome.PASSED, bit.reason  # the twins have a last bit in common by chance
    doubt = _judge(trainer, _inventory(_sized(20, 1.0, 0.5, -0.5 + 1.2e-6, digest="doubt")), *twins)
    assert (doubt.outcome, "may be chance" in doubt.reason) == (Outcome.INCONCLUSIVE, True), doubt.reason
    lost = _judge(trainer, _inventory(_sized(20, 0.0, 0.0, 0.0, digest="zero")), *twins)
    assert (lost.outcome, "model.mean" in lost.reason) == (Outcome.FAILED, True), lost.reason
    wild = [_inventory(_sized(20, 1.0, 0.5, -0.5 + n, digest=f"m{n}")) for n in range(3)]
    assert _judge(trainer, _inventory(_sized(20, 1.0, 0.5, 0.5, digest="m9")), *wild).outcome is Outcome.INCONCLUSIVE
    old = [_inventory(_one(20, tensors={"model.weight": "w20", "model.mean": f"m{n}"})) for n in range(3)]
    unsized = _judge(trainer, _inventory(_one(20, tensors={"model.weight": "w20", "model.mean": "x"})), *old)
    assert (unsized.outcome, "except 1 entry" in unsized.reason) == (Outcome.PASSED, True), unsized.reason


def test_rounding_after_a_restart_of_three_ranks_is_no_failure(trainer: Any) -> None:
    """Three ranks sum in another order once they were restarted: said, and passed. Not on two ranks, not before the
    restart, and not where the difference is larger than rounding makes it."""

    def judged(step: int, off: float, world: int) -> Finding:
        ours = _inventory(_sized(step, 1.0, 0.5, -0.5 + off, digest="other"))
        theirs = _inventory(_sized(step, 1.0, 0.5, -0.5, digest="one"))
        run = trainer(kills=KILL, world=world).record(inventory=ours)
        return CheckpointIntegrity().judge(run, [trainer(world=world).record(inventory=theirs)])

    finding = judged(20, 1e-7, 3)
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "equal except for rounding, at most 7e-08" in finding.reason
    assert judged(20, 0.0, 3).outcome is Outcome.PASSED  # bits differ, by less than a sketch tells
    assert judged(20, 0.0, 2).outcome is Outcome.FAILED
    assert judged(20, 1e-7, 2).outcome is Outcome.FAILED
    assert judged(10, 1e-7, 3).outcome is Outcome.FAILED
    assert judged(20, 1e-3, 3).outcome is Outcome.INCONCLUSIVE  # that of low precision is as large
    assert judged(20, 1e-1, 3).outcome is Outcome.FAILED


def test_rounding_of_an_entry_that_crosses_zero_is_of_its_usual_size(trainer: Any) -> None:
    """The moment of a single bias may be nearly zero in one checkpoint: what rounding adds is a large part of it there,
    and a small part of its usual size. On two ranks nothing is excused, and a lost moment is excused nowhere."""

    def judged(last: float, world: int = 3) -> Finding:
        usual = [_sized(step, 1.0, 1.0, 1.0, digest=f"usual{step}") for step in (10, 15)]
        ours, theirs = _sized(20, 1e-3, last, last, digest="a"), _sized(20, 1e-3, 1e-3, 1e-3, digest="b")
        run = trainer(kills=KILL, world=world).record(inventory=_inventory(*usual, ours))
        return CheckpointIntegrity().judge(run, [trainer(world=world).record(inventory=_inventory(*usual, theirs))])

    near = judged(1e-3 + 1e-7)
    assert near.outcome is Outcome.PASSED, near.reason
    assert "equal except for rounding" in near.reason
    assert judged(1e-3 + 1e-7, world=2).outcome is Outcome.FAILED
    assert judged(0.0).outcome is Outcome.FAILED


def test_a_tolerance_is_of_the_norm_of_each_tensor(trainer: Any) -> None:
    """As that of loss_continuity, it takes the place of bitwise, in both directions; numbers count as tensors do."""
    ours = _inventory({**_sized(20, 1.0, 0.5, -0.4, digest="other"), "values": {"step": "20", "lr": "0.11"}})
    theirs = _inventory({**_sized(20, 1.0, 0.5, -0.5, digest="one"), "values": {"step": "20", "lr": "0.1"}})
    run, twin = trainer(kills=KILL).record(inventory=ours), trainer().record(inventory=theirs)
    assert CheckpointIntegrity(tolerance=0.2).judge(run, [twin]).outcome is Outcome.PASSED
    finding = CheckpointIntegrity(tolerance=0.01).judge(run, [twin])
    assert (finding.outcome, finding.bound) == (Outcome.FAILED, {"tolerance": 0.01})


def test_what_counts_restarts_differs_and_is_no_loss(trainer: Any) -> None:
    """A value that speaks of restarts, and is what one restart makes of nothing, is told and not failed; any other that
    differs is named with the way to leave it out."""
    meta = {
        "meta.restarts": ("1", "0"),
        "meta.resumed": ("True", "False"),
        "args.resume": ("'/job/checkpoints/x'", "''"),
    }
    ours, theirs = (
        _inventory(_one(20, values={"step": "20", **{name: both[n] for name, both in meta.items()}})) for n in (0, 1)
    )
    finding = _judge(trainer, ours, theirs)
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "except args.resume, meta.restarts, meta.resumed, which show the restart" in finding.reason
    for name, value in (("meta.restarts", "2"), ("meta.lives", "1"), ("scheduler.last_restart", "7")):
        odd, even = (_inventory(_one(20, values={"step": "20", name: one})) for one in (value, "0"))
        finding = _judge(trainer, odd, even)
        assert finding.outcome is Outcome.FAILED, finding.reason
        assert f"ignore: [{name}]" in finding.reason
        run, twin = trainer(kills=KILL).record(inventory=odd), trainer().record(inventory=even)
        assert CheckpointIntegrity(ignore=(f"*{name[-6:]}",)).judge(run, [twin]).outcome is Outcome.PASSED


def test_saves_by_time_are_not_failed_for_their_steps(trainer: Any) -> None:
    """The run saved at other steps than the twin before any fault: its newest may be older, and files may lack."""
    run = trainer(every=7, kills=KILL).record(inventory=_inventory(steps=(7, 14, 21, 28)))
    finding = CheckpointIntegrity().judge(run, [trainer().record(inventory=_inventory())])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason


def _saved_earlier(run: Record, named_so: bool = True) -> Record:
    """All saves after the restart one step earlier, as a timer may have it; and by other names, or not."""

    def moved(event: Event) -> Event:
        if event.kind not in (Kind.SAVE_BEGIN, Kind.SAVE_END) or event.attempt != 1 or event.step is None:
            return event
        head, _dash, number = event.data["path"].rpartition("-")
        path = f"{head}-{int(number) - named_so}"
        return replace(event, step=event.step - 1, data={**event.data, "path": path})

    return replace(run, events=tuple(map(moved, run.events)))


def _by_time(trainer: Any, ours: dict[str, Any], theirs: dict[str, Any], named_so: bool = True) -> Finding:
    """Saves of steps 7, 13, 20 and 27 after a resume from step 7, where the twin's are 7, 14, 21 and 28."""
    run = _saved_earlier(trainer(every=7, kills=[(12, 1)]).record(inventory=ours), named_so)
    return CheckpointIntegrity().judge(run, [trainer(every=7).record(inventory=theirs)])


def test_no_count_of_steps_saves_off_the_grid(trainer: Any) -> None:
    """The twin saved every 7 steps. After a resume from step 7 a count of steps gives 14, and only a timer gives 13.
    Names that still speak of 14 do not: then the job counts wrongly."""
    ours, theirs = _inventory(steps=(7, 13, 20, 27)), _inventory(steps=(7, 14, 21, 28))
    finding = _by_time(trainer, ours, theirs)
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
    assert "each run saves at other steps" in finding.reason
    finding = _by_time(trainer, theirs, theirs, named_so=False)
    assert finding.outcome is Outcome.FAILED, finding.reason


def test_a_best_checkpoint_is_not_saved_by_time(trainer: Any) -> None:
    """It is of another step than the twin's because the best metric was lost: failed where all else is saved by steps.
    Where all else is saved by time, nothing tells which of the two it was."""

    def with_best(run: Record, local_step: int) -> Record:
        first = [e for e in run.of_kind(Kind.SAVE_BEGIN, Kind.SAVE_END) if e.attempt == 1][:4]
        best = [replace(e, step=local_step, data={**e.data, "path": "/job/checkpoints/best.pt"}) for e in first]
        return replace(run, events=tuple(sorted((*run.events, *best), key=lambda e: e.mono_s)))

    new, old = (_one(step, path="best.pt") for step in (17, 6))
    ours, theirs = _listing(*_inventory()["checkpoints"], new), _listing(*_inventory()["checkpoints"], old)
    run = with_best(trainer(kills=KILL).record(inventory=ours), 2)
    finding = CheckpointIntegrity().judge(run, [trainer().record(inventory=theirs)])
    assert (finding.outcome, "best.pt is of step 17" in finding.reason) == (Outcome.FAILED, True), finding.reason
    timed, twin = _inventory(steps=(7, 13, 20, 28)), _inventory(steps=(7, 14, 21, 28))
    timed["checkpoints"].append(_one(20, path="best.pt"))
    twin["checkpoints"].append(old)
    finding = _by_time(trainer, timed, twin)
    assert (finding.outcome, "best.pt" in finding.reason) == (Outcome.INCONCLUSIVE, True), finding.reason


def test_twins_that_differ_before_the_fault_are_a_measure_all_the_same(trainer: Any) -> None:
    """In a job whose losses are never the same twice, a lost tensor is failed: what counts is whether the run was
    further from its twins before the fault than they are from each other, as for the losses."""
    ours = _inventory(_one(20, tensors={"model.weight": "w20"}))
    run = trainer(kills=KILL, noise=1.0).record(inventory=ours)
    twins = [trainer(noise=float(n)).record(inventory=_inventory()) for n in (2, 3, 4)]
    finding = CheckpointIntegrity().judge(run, twins)
    assert (finding.outcome, "ema.weight" in finding.reason) == (Outcome.FAILED, True), finding.reason
    assert "The losses differ no more than noise or rounding explains: it is state that no loss shows" in finding.reason
    another = trainer(kills=KILL, noise=1.0, seed=8).record(inventory=ours)
    finding = CheckpointIntegrity().judge(another, twins)
    assert (finding.outcome, "can't be compared" in finding.reason) == (Outcome.INCONCLUSIVE, True), finding.reason


def test_equal_contents_are_of_one_step(trainer: Any) -> None:
    """A rank that makes no steps, such as an actor, saves beside the learner's step: before its end in one run, after
    it in the other. The contents say that the files are of the same moment; other contents are a difference."""

    def judged(step: int, state: str) -> Finding:
        both = [_one(15, path="actor_15.pt", tensors={"state": "s15"}, values={}), _one(20, path="actor_20.pt")]
        one = [_one(step, path="actor_15.pt", tensors={"state": state}, values={}), both[1]]
        run = trainer(kills=KILL).record(inventory=_listing(*_inventory()["checkpoints"], *one))
        return CheckpointIntegrity().judge(
            run, [trainer().record(inventory=_listing(*_inventory()["checkpoints"], *both))]
        )

    assert judged(14, "s15").outcome is Outcome.PASSED, judged(14, "s15").reason
    unread = [_one(step, path="actor_15.pt", tensors={}, values={}) for step in (14, 15)]
    ours, theirs = (_listing(*_inventory()["checkpoints"], one) for one in unread)
    found = CheckpointIntegrity().judge(
        trainer(kills=KILL).record(inventory=ours), [trainer().record(inventory=theirs)]
    )
    assert found.outcome is not Outcome.PASSED, found.reason
    assert judged(14, "s14").outcome is Outcome.FAILED, judged(14, "s14").reason


def test_a_resume_from_the_runs_own_folder_counts_the_restart(trainer: Any) -> None:
    """Values name the folder of a run by its placeholder: each run has its own, and both look alike."""
    names = {"root": "/runs/one/job/out"}
    both = [_one(20, values={"step": "20", "args.resume": value}) for value in ("'{run}/out/step-15'", "''")]
    ours, theirs = ({**_inventory(one), **names} for one in both)
    run, twin = trainer(kills=KILL).record(inventory=ours), trainer().record(inventory=theirs)
    job = replace(run.plan.job, checkpoints="{run}/out")
    ours_at, theirs_at = (_below(one, "/runs/one/job/out", job) for one in (run, twin))
    finding = CheckpointIntegrity().judge(ours_at, [theirs_at])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "except args.resume, which show the restart" in finding.reason
    elsewhere = replace(ours_at, plan=replace(run.plan, job=replace(job, checkpoints="{run}/other")))
    assert CheckpointIntegrity().judge(elsewhere, [theirs_at]).outcome is Outcome.FAILED


def _below(run: Record, root: str, job: PlannedJob) -> Record:
    """The record of a job that saved in this folder."""
    events = (
        replace(e, data={**e.data, "path": e.data["path"].replace("/job/checkpoints", root)}) if "path" in e.data else e
        for e in run.events
    )
    return replace(run, plan=replace(run.plan, job=job), events=tuple(events))


def test_a_save_that_raced_with_training_is_not_called_damage(trainer: Any) -> None:
    """What was found in the file as soon as it was written did not happen on the disk."""
    raced = {"problem": "it changed", "problems": [{"kind": "raced", "text": "it changed"}]}
    finding = _judge(trainer, _inventory(_one(20, **raced)), _inventory())
    assert finding.outcome is Outcome.FAILED
    assert "loads, but differs from what was in memory when it was saved: it changed" in finding.reason


def test_a_scenario_may_list_what_is_ignored() -> None:
    """As YAML gives it."""
    from torchaos.harness.scenario.checks import check_parameters

    told: list[object] = []
    given = {"ignore": ["args.*"], "tolerance": 1e-3}
    assert check_parameters(CheckpointIntegrity, given, (), lambda *problem: told.append(problem)) == given
    assert not told


def _unknown(path: str, **other: Any) -> dict[str, Any]:
    problem = {"kind": "unknown", "text": f"{path}: a plain pickle, not one of torch.save"}
    about = {"path": path, "format": "unknown", "tensors": {}, "values": {}, "problems": [problem]}
    return {**_one(0), "step": None, **about, **other}


def test_a_file_of_an_unknown_kind_is_no_damage(trainer: Any) -> None:
    """A replay buffer that no save wrote is left out, with a twin and without one."""
    finding = _judge(trainer, _inventory(_unknown("replay.pkl")), _inventory(_unknown("replay.pkl")))
    assert (finding.outcome, finding.measured["checkpoints"]) == (Outcome.PASSED, 6)
    assert _judge(trainer, _inventory(_unknown("replay.pkl"))).outcome is Outcome.PASSED


def test_a_saved_checkpoint_that_is_of_another_kind_now_is_damaged(trainer: Any) -> None:
    """The save wrote a format that is known. It is no damage if the twin's is of that kind as well."""
    ours = _inventory(_unknown("step-30"))
    finding = _judge(trainer, ours, _inventory())
    assert (finding.outcome, "which is not what was saved" in finding.reason) == (Outcome.FAILED, True)
    assert _judge(trainer, ours).outcome is Outcome.FAILED
    both = _judge(trainer, ours, ours)
    assert (both.outcome, "step-30 can't be read, and in the twin neither" in both.reason) == (Outcome.PASSED, True)
    assert "the newest of them is step-25" in both.reason, "whether step-30 is one is not known"


def test_what_can_be_read_in_the_twin_only_is_damaged(trainer: Any) -> None:
    """A flipped bit can make a pickle one that the reader does not know. Without a twin, nothing is known."""
    limit = {"kind": "limit", "text": "step-10: .metadata can't be read: a key that is a list"}
    ours = _inventory(_one(10, tensors={}, values={}, problems=[limit]))
    finding = _judge(trainer, ours, _inventory())
    assert (finding.outcome, "and the twin's can: step-10: .metadata" in finding.reason) == (Outcome.FAILED, True)
    assert _judge(trainer, ours).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(("kind", "outcome"), [("unreadable", "passed"), ("limit", "passed"), ("crc", "failed")])
def test_what_can_not_be_read_in_the_twin_either(trainer: Any, kind: str, outcome: str) -> None:
    """No fault made it so, and the rest of the checkpoint is compared. A wrong check sum counts all the same."""
    problem = None if kind == "limit" else "odd.pt: an opcode at 17"
    about = {
        "loadable": kind == "crc",
        "problem": problem,
        "problems": [{"kind": kind, "text": "odd.pt: an opcode at 17"}],
    }
    ours, theirs = (_inventory(_one(10, **about)) for _ in range(2))
    finding = _judge(trainer, ours, theirs)
    assert finding.outcome.value == outcome, finding.reason
    told = "parts of step-10 can't be read, and in the twin neither" in finding.reason
    assert told == (outcome == "passed"), finding.reason
    alone = _judge(trainer, ours)
    assert (alone.outcome is Outcome.FAILED) == (kind != "limit"), alone.reason


def test_saves_that_the_inventory_lacks_are_not_said_to_be_gone(trainer: Any) -> None:
    """Inventories of earlier versions list no file with an unknown name: nothing more is known than that it lacks
    them."""
    run = trainer(kills=[(18, 1)]).record(inventory={"root": "/job/checkpoints", "checkpoints": []})
    events = tuple(
        replace(event, data={**event.data, "path": f"{event.data['path']}/state.R"}) if "path" in event.data else event
        for event in run.events
    )
    reason = CheckpointIntegrity().judge(replace(run, events=events), []).reason
    assert "6 were saved during the run, and none of them was found" in reason


def test_a_name_that_the_job_keeps_is_that_of_a_finished_checkpoint(trainer: Any) -> None:
    """`.model` is unfinished only if the job was seen to rename such files."""
    hidden = {**_one(5), "path": ".model-5", "complete": False, "problem": "not finished by its name",
              "problems": [{"kind": "unfinished", "text": "not finished by its name"}]}  # fmt: skip
    run = trainer().record(inventory={"root": "/job/checkpoints", "checkpoints": [hidden]})
    events = [
        replace(event, data={**event.data, "path": str(event.data["path"]).replace("step-", ".model-")})
        if "path" in event.data else event
        for event in run.events
    ]  # fmt: skip
    (kept,) = checkpoints_of(replace(run, events=tuple(events))) or []
    assert (kept.good, kept.step) == (True, 5)
    moved = {"path": "/job/checkpoints/.model-10", "to": "/job/checkpoints/model-10"}
    events.append(replace(events[-1], kind=Kind.RENAMED, data=moved, seq=events[-1].seq + 1))
    (left,) = checkpoints_of(replace(run, events=tuple(events))) or []
    assert not left.complete


def test_files_beside_a_checkpoint_are_not_counted(trainer: Any) -> None:
    """The generators' states of each rank are a part of the checkpoint of their step, which its model names."""
    plain = _inventory()
    beside = [
        {**one, "path": f"{one['path']}.rng{rank}", "tensors": {"cpu": "1"}} for one in plain["checkpoints"]
        for rank in (0, 1)
    ]  # fmt: skip
    reason = _judge(trainer, {**plain, "checkpoints": [*plain["checkpoints"], *beside]}).reason
    assert reason.startswith(
        f"{len(STEPS)} checkpoints ({3 * len(STEPS)} files) are complete and loadable, the newest is step-{STEPS[-1]} "
    ), reason
