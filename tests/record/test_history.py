"""History: attempts get their steps from witnesses, and the final history is like that of an uninterrupted run."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import number_in_name
from torchaos.harness.record.history import Executions, History, base_of, saved_as
from torchaos.harness.record.history.first_steps import align
from torchaos.harness.record.history.saves_and_loads import number_in_contents, read_saves
from torchaos.harness.record.history.step_evidence import (
    CONTENTS,
    LOG,
    LOSSES,
    OPTIMIZER,
    RECORD,
    SAMPLES,
    Witness,
    decide,
)


def _trainer() -> Any:
    path = Path(__file__).parents[1] / "assertions" / "builder.py"
    spec = importlib.util.spec_from_file_location("torchaos_test_builder", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Trainer


Trainer = _trainer()


def _told(history: History) -> dict[tuple[int, int], Any]:
    return {key: (one.losses, one.samples, one.lr) for key, one in history.counting().items()}


@settings(max_examples=20)
@given(
    kills=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 1)), max_size=4),
    every=st.integers(1, 12),
    loads_seen=st.booleans(),
    counters_seen=st.booleans(),
)
def test_counting_history_of_an_ideal_trainer_is_the_straight_run(
    kills: list[tuple[int, int]], every: int, loads_seen: bool, counters_seen: bool
) -> None:
    """Wherever an ideal trainer dies and resumes, whatever is seen of it, what counts is the straight run."""
    straight = Trainer(every=every).record().history
    run = Trainer(
        every=every, kills=_possible(kills, every), loads_seen=loads_seen, counters_seen=counters_seen
    ).record()
    history = History.of(run.events, straight)
    assert history.unplaced == ()
    assert _told(history) == _told(straight)
    assert all(attempt.conflicts == () for attempt in history.attempts)


def _possible(kills: list[tuple[int, int]], every: int) -> list[tuple[int, int]]:
    """Only kills in a step that the attempt gets to."""
    found, base, reached = [], 0, 0
    for step, rank in kills:
        if step > base:
            found.append((step, rank))
            reached = max(reached, step - 1)
            base = reached // every * every
    return found


def test_base_comes_from_the_record_of_the_save() -> None:
    """The loaded checkpoint is known by the run's own record of its saving, whatever its name says."""
    run = Trainer(kills=[(18, 1)]).record()
    attempt = run.history.attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.witnesses[0].name) == (15, "the loaded checkpoint")
    assert attempt.loaded == "/job/checkpoints/step-15"
    assert (attempt.first_step, attempt.last_step, attempt.exit_codes) == (16, 30, {0: 0, 1: 0})
    first = run.history.attempt(0)
    assert first is not None
    assert first.exit_codes == {0: -15, 1: -9}


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("optimizer", "the optimizer's own step counter"),
        ("schedule", "the LR scheduler's counter"),
        ("sampler", "the samples"),
    ],
)
def test_a_witness_that_disagrees_is_kept_as_evidence(broken: str, name: str) -> None:
    """A part that was not restored speaks against the others, and the base still holds."""
    attempt = Trainer(kills=[(18, 1)], broken=frozenset({broken})).record().history.attempt(1)
    assert attempt is not None
    assert attempt.base == 15
    assert [conflict.startswith(f"by {name}") for conflict in attempt.conflicts] == [True]


def test_nobody_knows_the_base() -> None:
    """Nothing loaded, no counter, and samples and losses like nothing before: the steps have no global step. The rates
    alone are no proof."""
    broken = frozenset({"rng"})
    run = Trainer(kills=[(18, 1)], loads_seen=False, counters_seen=False, samples_seen=False, broken=broken).record()
    assert run.history.unplaced == (1,)
    assert run.history.last_step == 17


@pytest.mark.parametrize(("blind", "base"), [(False, 0), (True, None)])
def test_the_attempt_before_made_no_step(blind: bool, base: int | None) -> None:
    """An attempt died before its first step. The next loads nothing, and no counter, sample or loss shows a step: it
    begins at step 0, as the first would have. If an agent failed in the attempt before, its steps are not known."""
    seen = {"loads_seen": False, "counters_seen": False, "samples_seen": False}
    events = list(Trainer(kills=[(1, 0)], broken=frozenset({"rng"}), **seen).record().events)
    assert not [event for event in events if event.kind is Kind.STEP and event.attempt == 0]
    if blind:
        failed = {"hook": "steps", "error": "a bug"}
        at_s = events[0].mono_s
        events.append(Event(Kind.AGENT_FAILED, "rank0", 10**6, 0, at_s, attempt=0, rank=0, data=failed))
    attempt = History.of(events).attempt(1)
    assert attempt is not None
    assert attempt.base == base


def test_the_log_shows_that_the_attempt_before_made_steps() -> None:
    """The events of the first attempt are lost, but its log shows its steps, and the log of the next attempt begins
    with step 16: that attempt does not begin at step 0."""
    seen = {"loads_seen": False, "counters_seen": False, "samples_seen": False}
    run = Trainer(kills=[(18, 1)], broken=frozenset({"rng"}), **seen).record()
    lost = (Kind.STEP, Kind.LOSS, Kind.SAVE_BEGIN, Kind.SAVE_END)
    events = [event for event in run.events if event.attempt or event.kind not in lost]
    for number, event in enumerate(one for one in run.events if one.kind is Kind.STEP and one.rank == 0):
        step = (event.step or 0) + 15 * bool(event.attempt)
        line = {"step": step, "adapter": "regex", "loss": 1.0, "lr": 0.1}
        events.append(Event(Kind.LOG_STEP, "log", number, 0.0, event.mono_s + 0.001, data=line))
    attempt = History.of(events).attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.witnesses[0].name) == (15, "the job's log")


def test_a_file_of_another_run_after_an_attempt_without_a_step() -> None:
    """Two attempts load the same weights of another run. The first begins a save and dies before its first step. The
    second begins at step 0 too."""
    seen = {"loads_seen": False, "counters_seen": False, "samples_seen": False}
    run = Trainer(kills=[(1, 0)], broken=frozenset({"rng"}), losses_seen=False, **seen).record()
    events = list(run.events)
    for attempt in (0, 1):
        joined = max((one for one in run.events if one.kind is Kind.GROUP_JOINED and one.attempt == attempt),
                     key=lambda one: one.mono_s)  # fmt: skip
        own = [(Kind.LOAD_BEGIN, {}), (Kind.LOAD_END, {"ok": True, "numbers": {}})]
        for rank in (0, 1):
            for number, (kind, data) in enumerate(own):
                told = {"path": "/job/pre/weights.pt", "format": "torch", **data}
                at_s = joined.mono_s + 0.001 * (1 + number)
                source = f"rank{rank}-a{attempt}"
                events.append(Event(kind, source, 10**6 + number, 0.0, at_s, rank, attempt, 0, data=told))
        if attempt == 0:
            told = {"path": "/job/checkpoints/init.pt", "format": "torch"}
            at_s = joined.mono_s + 0.004
            events.append(Event(Kind.SAVE_BEGIN, "rank0-a0", 10**6 + 9, 0.0, at_s, 0, 0, 0, data=told))
    found = History.of(events).attempt(1)
    assert found is not None
    assert found.base == 0


def test_ranks_that_loaded_different_checkpoints_are_a_conflict() -> None:
    """One rank that went back further than the others is evidence, and the base is that of the most or the lowest."""
    run = Trainer(kills=[(18, 1)]).record()
    events = [
        event if event.kind is not Kind.LOAD_END or event.rank == 0 else _with(event, path="/job/checkpoints/step-10")
        for event in run.events
    ]
    attempt = History.of(events).attempt(1)
    assert attempt is not None
    assert attempt.base == 15
    assert "by the loaded checkpoint on rank 1, 10 steps were done, not 15" in attempt.conflicts[0]


def _with(event: Event, **data: Any) -> Event:
    return Event(**{**event.__dict__, "data": {**event.data, **data}})


def test_accelerates_own_count_of_batches_is_no_witness() -> None:
    """The only file with a number is that of the random states: its "step" counts the batches of an epoch, or stays
    0."""
    events = []
    for event in Trainer(kills=[(18, 1)]).record().events:
        events.append(_with(event, numbers={}) if event.kind is Kind.LOAD_END else event)
        if event.kind is Kind.LOAD_END:
            later = Event(**{**event.__dict__, "mono_s": event.mono_s + 0.001})
            events.append(_with(later, path="/job/checkpoints/step-15/random_states_0.pkl", numbers={"step": 0}))
    attempt = History.of(events).attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.conflicts) == (15, ())


def test_a_load_that_failed_says_nothing() -> None:
    """A checkpoint that could not be read is not the one that the job went on from, even when it was tried last."""
    run = Trainer(kills=[(18, 1)]).record()
    loads = [event for event in run.events if event.kind is Kind.LOAD_END]
    failed = [
        _with(Event(**{**load.__dict__, "mono_s": load.mono_s + 0.005}), path="/job/checkpoints/step-10", ok=False)
        for load in loads
    ]
    attempt = History.of([*run.events, *failed]).attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.loaded, attempt.conflicts) == (15, "/job/checkpoints/step-15", ())


@pytest.mark.parametrize(("many", "checkpoints"), [(4, False), (3, True)])
def test_files_that_the_steps_use_are_no_checkpoints(many: int, checkpoints: bool) -> None:
    """Such as gradients that ranks exchange as files, also if one is loaded just before the first step after a resume.
    A few loads in a row may put the same checkpoint back."""
    run = Trainer(kills=[(18, 1)]).record()
    load = next(event for event in run.events if event.kind is Kind.LOAD_END)
    steps = [event for event in run.events if event.kind is Kind.STEP and event.rank == 0 and event.attempt == 1]
    exchanged = [
        Event(**{**load.__dict__, "rank": 0, "step": (step.step or 0) - 1, "mono_s": step.mono_s - 1e-6,
                 "data": {**load.data, "path": f"/job/exchange/gradient-{step.step}", "numbers": {}}})
        for step in steps[:many]
    ]  # fmt: skip
    history = History.of([*run.events, *exchanged])
    assert any("exchange" in load.path for load in history.loads) is checkpoints
    if not checkpoints:
        assert [one.loaded for one in history.attempts] == [None, "/job/checkpoints/step-15"]


def test_a_checkpoint_that_was_loaded_and_not_used_is_no_resume() -> None:
    """One file of it was read and another could not be: the job began anew. So it did if it read both files, and used
    nothing of them: its losses are those of the first steps."""
    run = Trainer(kills=[(18, 1)], broken=frozenset({"optimizer", "sampler", "schedule", "rng", "weights"})).record()
    events = []
    for event in run.events:
        if event.kind is Kind.LOAD_END:
            failed = Event(**{**event.__dict__, "mono_s": event.mono_s + 0.001})
            events.append(_with(event, path="/job/checkpoints/step-15/trainer.pt"))
            events.append(_with(failed, path="/job/checkpoints/step-15/model.pt", ok=False))
        else:
            events.append(event)
    attempt = History.of(events).attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.loaded) == (0, None)
    again = [_with(e, ok=True) if e.data.get("path", "").endswith("model.pt") else e for e in events]
    attempt = History.of(again).attempt(1)
    assert attempt is not None
    assert attempt.base == 0
    assert attempt.conflicts[0].startswith("by the loaded checkpoint on ranks 0, 1, 15 steps were done, not 0")


def test_base_of_is_known_while_the_first_step_is_under_way() -> None:
    """A live harness gets the base from what one rank has written of its first step."""
    run = Trainer(kills=[(18, 1)]).record()
    first = next(i for i, e in enumerate(run.events) if e.kind is Kind.STEP and e.attempt == 1)
    assert base_of(run.events[: first + 1], 1)[0] == 15
    without = [event for event in run.events[: first + 1] if event.kind is not Kind.LOAD_END]
    base, witnesses = base_of(without, 1)
    assert (base, witnesses[0].name) == (15, "the optimizer's own step counter")


def test_nothing_loaded_and_all_from_the_start_is_base_zero() -> None:
    """A job that starts over is placed at 0: its counter and its samples say so."""
    attempt = Trainer(kills=[(4, 0)]).record().history.attempt(1)
    assert attempt is not None
    assert (attempt.base, attempt.conflicts) == (0, ())


def test_redone_pairs_each_execution_with_the_first() -> None:
    """Steps between the checkpoint and the kill are paired, once per rank and repetition."""
    history = Trainer(kills=[(18, 1), (17, 0)]).record().history
    pairs = [(old.attempt, new.attempt, new.global_step, new.rank) for old, new in history.redone()]
    assert pairs == [
        (0, 1, 16, 0), (0, 2, 16, 0), (0, 1, 16, 1), (0, 2, 16, 1), (0, 2, 17, 0), (0, 2, 17, 1),
    ]  # fmt: skip


def test_highest_step_and_steps_done() -> None:
    """What had been reached at a moment is told by time, attempt and rank."""
    run = Trainer(kills=[(18, 1)]).record()
    hit = next(event for event in run.events if event.kind is Kind.APPLYING)
    assert run.history.highest_step(before_s=hit.mono_s) == 17
    assert run.history.highest_step() == 30
    assert run.history.steps_done(1, 0, hit.mono_s) == 17
    assert run.history.steps_done(1, 1, run.history.attempts[1].started_s) == 15
    assert run.history.steps_done(1, None, 0.0) is None


def test_late_losses_are_merged_and_torn_saves_are_not_ok() -> None:
    """A loss that was copied late fills its place, and a save without an end is kept as unfinished."""
    run = Trainer(steps=5, every=5).record()
    events = [_with(e, losses=[None]) if e.kind is Kind.STEP and e.step == 3 else e for e in run.events]
    late = Event(Kind.LOSS, "rank0-a0", 10_000, 0.0, 900.0, 0, 0, 3, {"losses": [0.25]})
    ends = [e for e in events if e.kind is Kind.SAVE_END]
    history = History.of([*(e for e in events if e is not ends[-1]), late])
    assert history.counting()[3, 0].losses == (0.25,)
    assert not history.counting()[3, 1].loss_seen
    assert [(save.global_step, save.ok, save.ended_s, save.ranks) for save in history.saves] == [
        (5, False, None, (0, 1))
    ]


@pytest.mark.parametrize("every", [1, 5])
def test_without_an_agent_the_log_tells(every: int) -> None:
    """Log lines alone give steps, losses and what was done again; the base is known when each step has a line."""
    history = Trainer(kills=[(18, 1)], log_only=every).record().history
    assert (history.source, history.last_step) == ("log", 30)
    attempt = history.attempt(1)
    assert attempt is not None
    assert attempt.base == (15 if every == 1 else None)
    assert len(history.redone()) == (2 if every == 1 else 0)
    assert sorted({step for step, _rank in history.counting()}) == list(range(every, 31, every))


def test_a_log_line_is_a_witness_too() -> None:
    """Where all else is blind, the job's own log places the attempt."""
    blind = Trainer(
        kills=[(18, 1)], loads_seen=False, counters_seen=False, samples_seen=False, losses_seen=False
    ).record()
    steps = [event for event in blind.events if event.kind is Kind.STEP and event.rank == 0]
    lines = [
        Event(Kind.LOG_STEP, "harness", 10_000 + n, 0.0, one.mono_s + 0.001, None, None, None,
              {"step": (one.step or 0) + (15 if one.attempt else 0), "adapter": "regex"})
        for n, one in enumerate(steps)
    ]  # fmt: skip
    attempt = History.of([*blind.events, *lines]).attempt(1)
    assert attempt is not None
    assert (attempt.base, [one.name for one in attempt.witnesses]) == (15, ["the learning rates", "the job's log"])


def test_rates_that_never_change_are_no_witness() -> None:
    """They fit every step, so they show nothing, and are not named."""
    blind = Trainer(
        kills=[(18, 1)], loads_seen=False, counters_seen=False, samples_seen=False, losses_seen=False
    ).record()
    for lr, names in ((None, ["the learning rates"]), ([0.1], [])):
        edited = [
            replace(event, data={**event.data, "lr": lr}) if lr and event.kind is Kind.STEP else event
            for event in blind.events
        ]
        attempt = History.of(edited).attempt(1)
        assert attempt is not None
        assert [one.name for one in attempt.witnesses if "rates" in one.name] == names


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/run/checkpoints/step-20", 20),
        ("/run/checkpoint-20/optimizer.pt", 20),
        ("/run/iter_0000020", 20),
        ("/run/epoch=0-step=10.ckpt", 10),
        ("/run/global_step20/mp_rank_00_model_states.pt", 20),
        ("/run/checkpoint-20/rng_state_1.pth", 20),
        ("/run/ep0-ba10-rank0.pt", 10),
        ("/twins/3490f0c58d5ba3e372b42718/out/last.ckpt", None),
        ("/run/last.ckpt", None),
        ("/run/model.safetensors", None),
    ],
)
def test_number_in_name(path: str, step: int | None) -> None:
    """The step in the names that the common frameworks give their checkpoints."""
    assert number_in_name(path) == step


def test_number_in_contents_leaves_settings_out() -> None:
    """Of step-like entries the one that says how far training was counts, not how far it is to go."""
    assert number_in_contents({"max_steps": 60, "save_steps": 5, "global_step": 15}) == ("global_step", 15)
    assert number_in_contents({"trainer.step": 15, "step": 16}) == ("step", 16)
    assert number_in_contents({"epoch": 3, "_step_count": 16, "optimizer.state.0.step": 14}) is None


def test_a_file_that_counts_iterations_and_steps_denies_neither() -> None:
    """A job may make several steps in each iteration, and save both numbers."""
    run = Trainer(kills=[(18, 1)]).record()
    for numbers, denied in (({"iteration": 5}, True), ({"iteration": 5, "steps": 15}, False)):
        events = [_with(e, numbers=numbers) if e.kind is Kind.LOAD_END else e for e in run.events]
        attempt = History.of(events).attempt(1)
        assert attempt is not None
        assert attempt.base == 15
        assert any("holds iteration = 5" in conflict for conflict in attempt.conflicts) is denied


def test_a_file_written_in_place_is_known_by_its_last_save() -> None:
    """A checkpoint that is overwritten is the last whole save before it was read."""
    events = [
        Event(kind, "rank0-a0", n, 0.0, float(n), 0, 0, step, {"path": "/out/ckpt.pt", "format": "torch", "ok": True})
        for n, (kind, step) in enumerate(
            [
                (Kind.SAVE_BEGIN, 5),
                (Kind.SAVE_END, 5),
                (Kind.SAVE_BEGIN, 10),
                (Kind.SAVE_END, 11),
                (Kind.SAVE_BEGIN, 15),
            ]
        )
    ]
    found = saved_as("/out/ckpt.pt", read_saves(events, Executions.of([])), 100.0)
    assert found is not None
    assert (found.local_step, found.ok) == (10, True)


def test_the_base_contradicts_the_least_weight() -> None:
    """A number that may count from 0 or from 1 is settled by any other witness; a vague witness alone settles nothing,
    and neither does the position in the data, which a job may have lost. The order of the witnesses does not matter."""
    contents = Witness(CONTENTS, (15, 16), "")
    for base, said in (
        (16, [contents, Witness(OPTIMIZER, (16,), "")]),
        (15, [contents, Witness(SAMPLES, (0,), ""), Witness(LOG, (15,), "")]),
        (None, [contents]),
        (None, [Witness(OPTIMIZER, (10, 20), "")]),
        (10, [Witness(SAMPLES, (0, 10), ""), Witness(LOG, (10, 9, 11), "", prefers_first=True)]),
        (None, [Witness(SAMPLES, (10,), "")]),
        (None, []),
    ):
        assert decide(said)[0] == decide(said[::-1])[0] == base


def test_what_the_job_computes_outweighs_its_counter() -> None:
    """The optimizer's counter was saved one step ahead of the weights. The losses, the samples and the file say where
    the job went on; the counter is the finding."""
    said = [
        Witness(RECORD, tuple(range(21, 0, -1)), "saved in a thread", prefers_first=True),
        Witness(CONTENTS, (20, 21), "step = 20", prefers_first=True),
        Witness(OPTIMIZER, (21,), "it stood at 22"), Witness(SAMPLES, (20,), ""), Witness(LOSSES, (20,), ""),
        Witness(LOG, (20,), ""),
    ]  # fmt: skip
    assert decide(said) == (20, ("by the optimizer's own step counter, 21 steps were done, not 20: it stood at 22",))
    assert decide([said[1], said[2]])[0] is not None
    assert decide([replace(said[1], name=RECORD, fits=(20,)), said[2]]) == (None, ())


@given(st.lists(st.integers(0, 3), min_size=3, max_size=30), st.data())
def test_align_finds_where_a_slice_was_cut(content: list[int], data: st.DataObject) -> None:
    """The true place is always among those that fit, and each that is named does fit."""
    base = data.draw(st.integers(0, len(content) - 1))
    reference = {step: [key] for step, key in enumerate(content, start=1)}
    own = dict(enumerate(content[base:], start=1))
    found = align(own, reference)
    assert base in found
    assert all(content[other] == own[1] for other in found)


def test_a_save_is_known_by_the_name_that_it_got_in_the_end() -> None:
    """Each rename is of what had been saved before it: the next save of the same temporary name has a name of its own.
    Of a folder, all that is in it moves along."""

    def event(at: float, kind: Kind, step: int = 1, **data: Any) -> Event:
        return Event(kind, "rank0-a0", int(at), 0.0, at, 0, 0, step, data)

    def saved(at: float, path: str, step: int) -> list[Event]:
        begin = event(at, Kind.SAVE_BEGIN, step, path=path, format="torch")
        return [begin, event(at + 1, Kind.SAVE_END, step, path=path, format="torch", ok=True, blocked_s=0.1)]

    events = [
        *saved(1, "/out/now.tmp", 1), event(3, Kind.RENAMED, path="/out/now.tmp", to="/out/ckpt-1.pt"),
        *saved(4, "/out/now.tmp", 2), event(6, Kind.RENAMED, path="/out/now.tmp", to="/out/ckpt-2.pt"),
        *saved(7, "/out/step.part/x.pt", 3), event(9, Kind.RENAMED, path="/out/step.part", to="/out/step-3"),
        *saved(10, "/out/now.tmp", 4),
    ]  # fmt: skip
    assert [save.path for save in read_saves(events, Executions.of([]))] == [
        "/out/ckpt-1.pt", "/out/ckpt-2.pt", "/out/step-3/x.pt", "/out/now.tmp",
    ]  # fmt: skip
