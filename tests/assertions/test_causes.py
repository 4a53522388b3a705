"""Causes of a difference from the twin, each by the words of its claim (harness/analysis/claims.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from torchaos.assertions.loss_continuity import LossContinuity
from torchaos.assertions.lr_continuity import LrContinuity
from torchaos.assertions.parameter_digest import ParameterDigest
from torchaos.assertions.sample_accounting import SampleAccounting
from torchaos.assertions.state_restored import StateRestored
from torchaos.harness.analysis.checkpointing.carried_state import resumes_carried
from torchaos.harness.analysis.checkpointing.checkpoint_contents import Clash
from torchaos.harness.analysis.comparison.agreement import Difference
from torchaos.harness.analysis.comparison.causes import likeliest_cause
from torchaos.harness.analysis.comparison.parameters import meaning
from torchaos.harness.analysis.findings import resumed_state
from torchaos.harness.interfaces import First, Outcome, What
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.record import Record

KILL = [(18, 1)]
SUM, OTHER = ["float32 4x4", "1" * 16], ["float32 4x4", "2" * 16]


def _edited(record: Any, kind: Kind, edit: Callable[[Event], dict[str, Any] | None]) -> Any:
    """The record with these entries in the payloads of the events of a kind."""
    events = [
        replace(event, data={**event.data, **(edit(event) or {})}) if event.kind is kind else event
        for event in record.events
    ]
    return replace(record, events=tuple(events))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            {"frozen": {"base": OTHER}},
            "frozen parameters were not restored: the frozen parameters base are others",
        ),
        ({"buffers": {"mean": OTHER}}, "buffers of the model were not restored: the buffers mean are others; the RNG"),
        (
            {"inputs": {".0.0": OTHER}},
            "the model's inputs (argument 0) are others in step 16, although the samples are the right ones: what "
            "prepares them was not restored; the RNG",
        ),
    ],
)
def test_each_part_of_the_state_is_a_cause(trainer: Any, edit: dict[str, Any], words: str) -> None:
    """Frozen parameters, buffers and inputs come before the RNG states in the order of the data flow. A part that is
    what it was after another step is told so."""
    there = {"frozen": {"base": SUM}, "buffers": {"mean": SUM}, "inputs": {".0.0": SUM}}
    run, twin = (
        _edited(record, Kind.BEGUN, lambda event: {**there, **(edit if event.attempt and not event.step else {})})
        for record in (
            trainer(kills=KILL, broken=frozenset({"rng"}), named=True).record(),
            trainer(named=True).record(),
        )
    )
    finding = LossContinuity().judge(run, [twin])
    assert finding.outcome is Outcome.FAILED
    assert words in finding.reason


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ({"": "eval"}, "the modules of the model are in eval mode, and were not"),
        ({"": "train", "0.drop": "eval"}, "the modules 0.drop are in eval mode, and were not"),
        ({"": "train", "head": "train"}, "the modules head are in train mode, and were not"),
        ({"": "train", "head": "eval", "Teacher:": "eval"}, ""),
        ({}, ""),
    ],
    ids=["all", "one", "not frozen", "another module", "not recorded"],
)
def test_a_module_that_was_left_in_another_mode_is_a_cause(trainer: Any, modes: dict[str, str], words: str) -> None:
    """As after an evaluation without train(). Named are the outermost modules whose mode is another one; a module that
    one record lacks is not compared."""
    there = {"": "train", "head": "eval"}
    if modes == {"": "eval"}:  # then the head is in the mode that it had
        there = {"": "train"}
    run, twin = (
        _edited(record, Kind.BEGUN, lambda event: {"modes": modes if event.attempt and not event.step else there})
        for record in (
            trainer(kills=KILL, broken=frozenset({"rng"}), named=True).record(),
            trainer(named=True).record(),
        )
    )
    reason = LossContinuity().judge(run, [twin]).reason
    assert (f"modules are in another mode than before: {words}" in reason) if words else "modules" not in reason, reason


@pytest.mark.parametrize(("edit", "told"), [({}, True), ({"buffers": {"mean": OTHER}}, False)], ids=["alone", "beside"])
def test_a_generator_that_the_forward_does_not_draw_from(trainer: Any, edit: dict[str, Any], told: bool) -> None:
    """The loop may draw from it, such as the noise of a diffusion model. It is named if nothing else differs, but not
    as one that the model draws from."""
    there = {"buffers": {"mean": SUM}, "drawn": []}
    run, twin = (
        _edited(record, Kind.BEGUN, lambda event: {**there, **(edit if event.attempt and not event.step else {})})
        for record in (
            trainer(kills=KILL, broken=frozenset({"rng"}), named=True).record(),
            trainer(named=True).record(),
        )
    )
    reason = LossContinuity().judge(run, [twin]).reason
    assert ("the RNG state was not restored: the states" in reason) is told, reason
    assert "the model draws" not in reason


def test_a_generator_is_no_cause_if_the_update_explains_the_loss(trainer: Any) -> None:
    """The first loss after the resume agrees, and the moments act on the next one."""
    run, twin = (
        _edited(record, Kind.BEGUN, lambda event: {
            "drawn": [], **({"rng": {"torch": "0" * 32}} if event.attempt and not event.step else {}),
        })
        for record in (
            trainer(kills=KILL, broken=frozenset({"momentum"}), named=True).record(), trainer(named=True).record()
        )
    )  # fmt: skip
    reason = LossContinuity().judge(run, [twin]).reason
    assert "the optimizer's moments were not restored" in reason
    assert "RNG" not in reason


def test_a_learning_rate_is_told_with_the_story_of_the_schedule(trainer: Any) -> None:
    """Its own counter was not seen."""

    def rate(event: Event) -> dict[str, Any]:
        return {"lr": [0.1 / ((event.step or 0) + 15 * (event.attempt or 0))], "sched_step": None}

    run, twin = (_edited(record, Kind.STEP, rate) for record in (trainer(kills=KILL).record(), trainer().record()))
    assert LossContinuity().judge(run, [twin]).outcome is Outcome.PASSED
    late = _edited(run, Kind.STEP, lambda event: {"lr": [0.1]} if event.attempt else None)
    assert "the learning rate was 0.1 instead of 0.00625 in step 16: it stays at 0.1" in LossContinuity().judge(
        late, [twin]
    ).reason  # fmt: skip


def test_a_number_of_backwards_that_nothing_explains(trainer: Any) -> None:
    """A step had one more than in the twin, not at the begin of an attempt."""
    run = trainer(kills=KILL).record()
    more = _edited(run, Kind.STEP, lambda e: {"losses": e.data["losses"] * 2} if e.attempt and e.step == 3 else None)
    reason = LossContinuity().judge(more, [trainer().record()]).reason
    assert "nothing that was recorded explains why it had another number of backwards" in reason


def test_an_attempt_that_is_not_placed_has_no_cause(trainer: Any) -> None:
    """Where its steps belong is not known, so nothing can be compared."""
    run, twin = trainer(kills=KILL).record(), trainer().record()
    last = run.history.segments[-1]
    history: Any = SimpleNamespace(segments=[replace(last, base=None)], attempt=run.history.attempt)
    ours, theirs = run.history.by_step(), twin.history.by_step()
    cause = likeliest_cause(run, history, ours, theirs, Difference("loss", 20, 0, 1.0, 2.0, 1.0))
    assert cause[:2] == (
        "The step from which that attempt continued is not known, and so the cause is not known either.",
        "",
    )


@pytest.mark.parametrize(
    ("norms", "begun", "words"),
    [
        ((1.0, 2.0), (None, None), "The norms of their gradients differ too, although DDP makes them equal"),
        ((1.0, 1.0), ("a" * 32, "b" * 32), "They began step 16 with different parameters: not all ranks loaded the"),
        ((None, None), (None, None), "Their gradients were not seen, and so the cause is not known."),
        ((1.0, 1.0), (None, None), "Their gradients' norms after the backward are equal: what differs after it"),
    ],
)  # fmt: skip
def test_why_replicas_are_apart(trainer: Any, norms: Any, begun: Any, words: str) -> None:
    """By their gradients, by what they began with, or not known: as far as it was recorded."""

    def edit(event: Event) -> dict[str, Any]:
        rank = event.rank or 0
        first = event.attempt == 1 and event.step == 1
        return {"norm": norms[rank], "restored": begun[rank] if first else None}

    run = _edited(trainer(kills=KILL, apart=1, state_seen=True).record(), Kind.STEP, edit)
    found = ParameterDigest(replicas_only=True).judge(run, [])
    assert found.outcome is Outcome.FAILED
    assert words in found.reason


def test_a_step_whose_gradients_differ_before_the_loss(trainer: Any) -> None:
    """The first losses agree, and the norms of the gradients do not: what was not recorded acts on the gradients."""
    run = trainer(kills=KILL, broken=frozenset({"momentum"}), counters_seen=False).record()
    twin = trainer(counters_seen=False).record()
    run = _edited(run, Kind.STEP, lambda event: {"norm": 2.0 if event.attempt else 1.0})
    twin = _edited(twin, Kind.STEP, lambda event: {"norm": 1.0})
    reason = LossContinuity().judge(run, [twin]).reason
    assert "acts on the gradients, since in step 16 their norms differ and no loss does" in reason
    assert "or in the update" not in reason


def test_gradients_that_the_job_changes_after_the_backward(trainer: Any) -> None:
    """Their norms are recorded at the end of the backward: what comes after it, also on the gradients, is not known."""
    away = [1.0, *([0.5] * 16)]

    def edit(event: Event) -> dict[str, Any]:
        return {"norm": 1.0, "sketch": away if event.attempt else [1.0, *([0.0] * 16)]}

    run = _edited(trainer(kills=KILL, broken=frozenset({"momentum"}), counters_seen=False).record(), Kind.STEP, edit)
    twin = _edited(trainer(counters_seen=False).record(), Kind.STEP, edit)
    reason = LossContinuity().judge(run, [twin]).reason
    assert "acts on the gradients after the backward, or in the update, since the norms after the backward" in reason


def test_an_update_that_changes_nothing_is_the_cause(trainer: Any) -> None:
    """A load with assign=True after the optimizer was made: the optimizer keeps tensors that the model no longer uses,
    so no update changes them, and its counter stands still."""

    def edit(event: Event) -> dict[str, Any]:
        if event.attempt and event.step == 1:
            return {"parameters": event.data["restored"], "opt_step": event.data["opt_step"] - 1}
        return {"losses": [9.9]} if event.attempt else {}

    run = _edited(trainer(kills=KILL, state_seen=True).record(), Kind.STEP, edit)
    twin = trainer(state_seen=True).record()
    for assertion in (LossContinuity(), ParameterDigest()):
        cause = assertion.judge(run, [twin]).cause
        assert cause == (
            "step 16 changed none of the parameters that the optimizer holds, and changed them in the twin"
        ), cause


def test_what_a_checkpoint_that_differs_means() -> None:
    """With losses that agree, or that differ no more than rounding does."""
    tensor, whole = (Clash(5, "a.pt", kind, "w", "1", "2") for kind in ("tensor", "checkpoint"))
    told = meaning(None, True, tensor, seen=True)
    assert told == "The losses agree: it is state that no loss shows, or it was damaged on disk."
    assert meaning(None, False, tensor, seen=True, clear=False) == "Whether the losses agree is not clear."
    told = meaning(None, False, whole, seen=True)
    assert told == (
        "The losses differ no more than noise or rounding explains: most likely, state that was not restored decides "
        "what is saved."
    )


@pytest.mark.parametrize("seen", [True, False])
def test_parameters_that_the_fault_itself_changed(trainer: Any, seen: bool) -> None:
    """The job was never restarted, and no loss shows it."""

    def edit(event: Event) -> dict[str, Any]:
        other = {"parameters": "f" * 32} if event.step == 30 else {}
        return {**other, **({} if seen else {"losses": []})}

    run = _edited(trainer(state_seen=True).record(), Kind.STEP, edit)
    at = next(event for event in run.events if event.kind is Kind.STEP and event.step == 20)
    data = {"fault": "kill", "phase": "backward", "global_step": 20, "pid": 1001}
    hit = Event(Kind.APPLYING, "rank1-a0", 9_000, 0.0, at.mono_s, 1, 0, 19, data)
    run = replace(run, events=(*run.events, hit))
    twin = _edited(trainer(state_seen=True).record(), Kind.STEP, lambda event: {} if seen else {"losses": []})
    found = ParameterDigest().judge(run, [twin])
    assert found.cause == "the fault itself changed the parameters"
    losses = "The losses agree" if seen else "The losses were not seen"
    assert f"{losses}, and the job had not been restarted by then: most likely the fault itself" in found.reason


def test_a_position_that_is_kept_apart_from_the_weights_is_named(trainer: Any) -> None:
    """A small file with the position is written each step, the weights seldom: after a resume, data and rates go on
    where they were, on older weights. No scheduler is there that could have made steps."""

    class Apart(trainer):  # type: ignore[misc]
        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            if attempt and local == 1:
                state.position, state.sched_step = 12, 12
            super()._step(attempt, world, state, step, local)

    run = Apart(kills=((13, 1),), state_seen=True, counters_seen=False).record()
    twin = trainer(state_seen=True, counters_seen=False).record()
    assert run.history.attempts[1].base == 10
    reason = LossContinuity().judge(run, [twin]).reason
    assert "those after step 10, and its samples and learning rates go on after step 12" in reason, reason
    assert "2 steps apart, and the updates of steps 11 to 12 are lost" in reason
    rates = LrContinuity().judge(run, [twin]).reason
    assert "The rates are those of the twin 2 steps later" in rates, rates


def test_constant_rates_do_not_tell_where_a_position_is(trainer: Any) -> None:
    """A sampler whose saved state is ahead skips batches. Rates that stay equal fit each step, so no update is said to
    be lost: the samples alone are other ones."""

    class Ahead(trainer):  # type: ignore[misc]
        def _step(self, attempt: int, world: int, state: Any, step: int, local: int) -> None:
            if attempt and local == 1:
                state.position = 12
            state.sched_step = 0
            super()._step(attempt, world, state, step, local)

    run = Ahead(kills=((13, 1),), state_seen=True, counters_seen=False).record()
    twin = Ahead(state_seen=True, counters_seen=False).record()
    reason = LossContinuity().judge(run, [twin]).reason
    assert "the data: ranks 0, 1 were given other samples in step 11" in reason, reason
    assert "learning rates go on" not in reason
    assert "lost" not in reason


def test_ranks_that_load_the_files_of_others_are_told(trainer: Any) -> None:
    """Each rank has an optimizer's file of its own, and nothing of its state is recorded. That ranks read each other's
    is told, beside a cause that was not recorded, if they do not read their own: it may be as it should be."""
    where = "/job/checkpoints/step-15"

    def with_files(read: dict[int, int]) -> Any:
        run, events = trainer(kills=((18, 1),)).record(), []
        for event in run.events:
            data = dict(event.data)
            if event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END) and data["path"] == where:
                data["path"] = f"{where}/optim_{event.rank}.pt"
            if event.kind in (Kind.LOAD_BEGIN, Kind.LOAD_END) and event.attempt == 1:
                data["path"] = f"{where}/optim_{read[event.rank or 0]}.pt"
            if event.kind is Kind.STEP and event.attempt == 1 and (event.step or 0) > 1:
                data["losses"] = [loss * 1.5 for loss in data["losses"]]
            events.append(replace(event, data=data))
        return replace(run, events=tuple(events))

    twin = trainer().record()
    told = [LossContinuity().judge(with_files(read), [twin]).reason for read in ({0: 1, 1: 0}, {0: 0, 1: 1})]
    words = (
        "something that was not recorded (rank 0 loaded optim_1.pt, which rank 1 had saved, and not "
        "optim_0.pt, which it had saved itself"
    )
    assert [words in reason for reason in told] == [True, False], told


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("others", [{".0.1"}, {".0.0", ".0.1"}])
def test_what_the_job_carries_into_the_model_is_no_sample(trainer: Any, others: set[str], alone: bool) -> None:
    """Rows of each input are taken for samples where no data loader gives them. If only some of the inputs are others,
    no sample was skipped; if all are, they may be the samples. If rank 0 saves `alone`, its inputs are compared."""

    def inputs(event: Event) -> dict[str, Any]:
        given = {".0.0": SUM, ".0.1": SUM}
        return {"inputs": {name: OTHER if event.attempt and name in others else of for name, of in given.items()}}

    def step(event: Event) -> dict[str, Any]:
        late = event.attempt == 1
        rows = [f"x{row}" for row in event.data["samples"][:2]] if late else []
        return {"samples": [*rows, *event.data["samples"][len(rows) :]], "indices": None,
                **({"losses": [9.9]} if late else {})}  # fmt: skip

    def made(kills: Any) -> Any:
        found = _edited(_edited(trainer(kills=kills, named=True).record(), Kind.BEGUN, inputs), Kind.STEP, step)
        seen = (e for e in found.events if not (alone and e.kind is Kind.BEGUN and e.rank and e.step))
        return replace(found, events=tuple(seen))

    run, twin = made(KILL), made(())
    where = " on rank 0" if alone else ""
    words = f"the model's inputs (argument 1){where} are others in step 16, and its other inputs are the right ones"
    for assertion in (LossContinuity(), SampleAccounting()):
        found = assertion.judge(run, [twin])
        assert found.outcome is Outcome.FAILED
        assert (words in found.reason) is (len(others) == 1), found.reason
        told = "samples are not the twin's" in found.reason or "were given samples" in found.reason
        assert told is (len(others) == 2)


@pytest.mark.parametrize(("kept", "what"), [(2, What.LOSSES), (1, What.LOSS)])
def test_a_loss_before_the_samples_that_differ_does_not_follow_from_them(trainer: Any, kept: int, what: What) -> None:
    """Of two backwards of a step, the first has the twin's samples (`kept` of its two) and another loss: the RNG is its
    cause, and samples that are drawn later follow. If its own samples differ already, they are a cause."""

    def two(event: Event) -> dict[str, Any]:
        return {"losses": [*event.data["losses"], *event.data["losses"]]}

    def other(event: Event) -> dict[str, Any]:
        rows = event.data["samples"]
        late = event.attempt == 1 and event.step == 1
        return {
            **two(event),
            "samples": [*rows[:kept], *(f"{9 + at:016x}" for at in range(4 - kept))] if late else rows,
        }

    run = _edited(trainer(kills=KILL, broken=frozenset({"rng"}), named=True).record(), Kind.STEP, other)
    twin = _edited(trainer(named=True).record(), Kind.STEP, two)
    found = LossContinuity().judge(run, [twin])
    assert (found.outcome, found.first) == (Outcome.FAILED, First(what, 16))
    assert "the RNG state" in found.cause
    assert ("were given" in found.cause) is (kept == 1)


def test_a_number_that_was_saved_shows_where_to_look(trainer: Any) -> None:
    """Samples that were not seen are the first suspects of a first loss that differs, and a position in the next
    checkpoints that is not the twin's is told beside them. A time, a value that is no whole number, and a number that
    differs already before the fault, such as a process id, are not."""
    numbers = {"saved_time": 1_790_000_000, "loss": 0.5, "pid": 7, "loader.pos": 80}

    def inventory(pid: int = 7, **other: float) -> dict[str, Any]:
        about = {"format": "torch", "complete": True, "loadable": True, "problems": [], "tensors": {"w": "1"}}
        values = {10: {**numbers, "pid": pid}, 20: {**numbers, "pid": pid, **other}}
        found = [
            {**about, "path": f"step-{step}", "step": step, "values": {name: str(one) for name, one in of.items()}}
            for step, of in values.items()
        ]
        return {"root": "/job/checkpoints", "checkpoints": found}

    run = trainer(kills=KILL, broken=frozenset({"sampler"}), samples_seen=False)
    twin = trainer(samples_seen=False).record(inventory=inventory())
    cases: list[tuple[dict[str, Any], bool]] = [
        ({"loader.pos": 95}, True), ({"loss": 0.6, "saved_time": 1_790_000_333}, False), ({"pid": 8}, False)
    ]  # fmt: skip
    for other, told in cases:
        cause = LossContinuity().judge(replace(run, kills=KILL).record(inventory=inventory(**other)), [twin]).cause
        assert cause.startswith("something that was not recorded, such as the samples")
        assert ("(in step-20, loader.pos is 95 instead of 80)" in cause) is told
        assert told or "step-20" not in cause, cause


@pytest.mark.parametrize(("loads", "told"), [("twin", "the twin loaded best.pt after step 20, and the job did not"),
                                             ("run", "the job loaded best.pt after step 20, and the twin did not"),
                                             ("both", "")])  # fmt: skip
def test_a_load_that_only_one_of_run_and_twin_makes_is_told(trainer: Any, loads: str, told: str) -> None:
    """Such as that of the best checkpoint, which a lost score decides. What both load is no cause."""

    def with_load(run: Record) -> Record:
        end = max(e.mono_s for e in run.events if e.kind is Kind.STEP and _global(e, run) == 20)
        data = {"path": "/job/best.pt", "format": "torch", "ok": True, "numbers": {}}
        last = run.events[-1]
        new = [
            Event(kind, f"late{rank}", 9_000, 0.0, end + 1e-4, rank, last.attempt or run.history.attempts[-1].number,
                  20 - (run.history.attempts[-1].base or 0), data)
            for rank in (0, 1) for kind in (Kind.LOAD_BEGIN, Kind.LOAD_END)
        ]  # fmt: skip
        return replace(run, events=tuple(sorted([*run.events, *new], key=lambda event: event.mono_s)))

    def scaled(event: Event) -> dict[str, Any]:
        late = event.attempt == 1 and (event.step or 0) > 5
        return {"losses": [1.1 * loss for loss in event.data["losses"]]} if late else {}

    run, twin = _edited(trainer(kills=KILL).record(), Kind.STEP, scaled), trainer().record()
    run = with_load(run) if loads != "twin" else run
    twin = with_load(twin) if loads != "run" else twin
    found = LossContinuity().judge(run, [twin])
    assert (found.outcome, found.measured["step"]) == (Outcome.FAILED, 21)
    assert found.cause.startswith(told) if told else "best.pt" not in found.cause, found.cause


def _global(event: Event, run: Record) -> int:
    attempt = run.history.attempt(event.attempt or 0)
    return (event.step or 0) + ((attempt.base or 0) if attempt else 0)


def test_ranks_that_load_files_of_other_steps_are_a_cause_if_nothing_else_is(trainer: Any) -> None:
    """No counter shows whether the rank went on from its file: it makes no steps. Nothing else that was recorded
    differs."""

    def of_learner(run: Record, old: bool) -> Record:
        events = (
            replace(e, data={**e.data, "path": e.data["path"].replace("step-15", "step-10")})
            if old and e.rank == 1 and e.kind in (Kind.LOAD_BEGIN, Kind.LOAD_END) else e
            for e in run.events if not (e.kind is Kind.STEP and e.rank == 1)
        )  # fmt: skip
        return replace(run, events=tuple(events))

    twin = of_learner(trainer().record(), old=False)
    for old in (True, False):
        run = of_learner(trainer(kills=KILL).record(), old)
        run = _edited(run, Kind.STEP, lambda e: {"losses": [1.1]} if e.attempt else {})
        cause = LossContinuity().judge(run, [twin]).cause
        assert ("rank 1 loaded a checkpoint of step 10, and the job went on from step 15" in cause) is old, cause


@pytest.mark.parametrize(("attribute", "what"), [("masters", "masters"), ("exp_avg", "moments"), ("m", "moments")])
def test_what_an_optimizer_of_a_plain_class_keeps_has_its_own_name(trainer: Any, attribute: str, what: str) -> None:
    """Master copies are no moments: who looks there finds them right."""

    def edit(event: Event) -> dict[str, Any]:
        return {"moments": {f"weight/{attribute}": OTHER if event.attempt else SUM}}

    run = _edited(trainer(kills=KILL, broken=frozenset({"momentum"}), named=True).record(), Kind.BEGUN, edit)
    twin = _edited(trainer(named=True).record(), Kind.BEGUN, edit)
    words = f"the optimizer's {what} were not restored: the {what} of weight are others"
    assert words in LossContinuity().judge(run, [twin]).reason
    assert f"the {what} of the optimizer with which attempt 1 began" in StateRestored().judge(run, [twin]).reason


def test_samples_that_differ_between_the_twins_too_are_no_cause(trainer: Any) -> None:
    """An augmentation that nothing seeds gives each run inputs and losses of its own. The first loss after the resume
    is farther off than that, and the inputs don't explain it."""

    def made(number: int, kills: Any) -> Any:
        def step(event: Event) -> dict[str, Any]:
            lost = 0.5 if event.attempt else 0.0
            return {
                "samples": [f"{number}-{sample}" for sample in event.data["samples"]], "indices": None,
                "losses": [loss * (1 + 1e-6 * number) + lost for loss in event.data["losses"]],
            }  # fmt: skip

        return _edited(trainer(kills=kills).record(), Kind.STEP, step)

    run, *twins = (made(number, () if number else KILL) for number in range(4))
    found = LossContinuity().judge(run, twins)
    assert found.outcome is Outcome.FAILED
    assert "the samples differ between the twins too" in found.reason, found.reason
    assert "given" not in found.reason, found.reason


@pytest.mark.parametrize("many", [1, None], ids=["one of the batch", "the batch"])
def test_inputs_that_the_twin_never_had_may_be_made_by_the_job(trainer: Any, many: int | None) -> None:
    """No data loader gives the noise of a diffusion model. If a generator of the job's own was not restored, the inputs
    are others, and the data may be the right ones; also if only some inputs of a batch are others, as with a rare
    augmentation."""

    def made(kills: Any) -> Any:
        def step(event: Event) -> dict[str, Any]:
            odd = event.attempt == 1 and event.rank == 1
            of_step = event.data["samples"]
            samples = (
                [f"noise {sample}" for sample in of_step][:many] + of_step[many or len(of_step) :] if odd else of_step
            )
            losses = {"losses": [9.9]} if odd else {}
            return {"samples": samples, "indices": None, **losses}

        return _edited(trainer(kills=kills).record(), Kind.STEP, step)

    run, twin = made(KILL), made(())
    assert "the data, or what the job makes it from: rank 1 was given" in (LossContinuity().judge(run, [twin]).reason)
    told = SampleAccounting().judge(run, [twin]).reason
    assert "no data loader gave them: the job may compute them" in told, told


@pytest.mark.parametrize(("loss", "outcome"), [(None, Outcome.PASSED), (9.9, Outcome.FAILED)])
def test_a_forward_after_the_last_update_is_of_the_step_before(
    trainer: Any, loss: float | None, outcome: Outcome
) -> None:  # fmt: skip
    """Rank 1 of a GAN lets the discriminator judge once more before the save, and this is counted to the next step. A
    process that resumes from that save lacks these inputs, and its losses are the twin's."""

    def made(kills: Any) -> Any:
        def step(event: Event) -> dict[str, Any]:
            if event.rank != 1:
                return {"losses": [None], "indices": None}
            once_more = (
                [] if event.attempt == 1 and event.step == 1 else [f"fake {one}" for one in event.data["samples"]]
            )
            other = {"losses": [loss]} if loss and event.attempt == 1 and event.step == 1 else {}
            return {"samples": [*once_more, *event.data["samples"]], "indices": None, **other}

        return _edited(trainer(kills=kills).record(), Kind.STEP, step)

    found = SampleAccounting().judge(made(KILL), [made(())])
    assert found.outcome is outcome, found.reason


def test_inputs_of_another_part_of_the_model_are_no_other_samples(trainer: Any) -> None:
    """A body that stays frozen is called without gradients, so the inputs of the head are seen as the samples. The
    losses of the first step are the twin's: it is not said that the data are others."""

    def made(kills: Any) -> Any:
        def step(event: Event) -> dict[str, Any]:
            odd = event.attempt == 1
            samples = [f"feature {sample}" for sample in event.data["samples"]] if odd else event.data["samples"]
            losses = {"losses": [9.9]} if odd and (event.step or 0) > 1 else {}
            return {"samples": samples, "indices": None, **losses}

        return _edited(trainer(kills=kills, named=True).record(), Kind.STEP, step)

    run, twin = made(KILL), made(())
    found = SampleAccounting().judge(run, [twin])
    assert found.outcome is Outcome.INCONCLUSIVE, found.reason
    assert "they are the inputs of another part of the model" in found.reason
    reason = LossContinuity().judge(run, [twin]).reason
    assert "samples" not in reason, reason


def test_samples_of_a_step_whose_losses_are_0_may_be_others(trainer: Any) -> None:
    """The first loss of a policy may be 0 whatever it samples: that it is the twin's shows nothing of the samples."""

    def made(kills: Any) -> Any:
        def step(event: Event) -> dict[str, Any]:
            samples = (
                [f"other {sample}" for sample in event.data["samples"]] if event.attempt else event.data["samples"]
            )
            return {"samples": samples, "indices": None, "losses": [0.0]}

        return _edited(trainer(kills=kills).record(), Kind.STEP, step)

    found = SampleAccounting().judge(made(KILL), [made(())])
    assert found.outcome is Outcome.FAILED, found.reason


def test_a_parameter_that_a_load_makes_of_a_tie_is_a_cause(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that assigns tensors breaks the tie of two parameters: one more is trained, on each rank. The sums of all
    parameters are then of other parameters."""

    def begun(event: Event) -> dict[str, Any] | None:
        own = {**event.data["parameters"], **({"head.weight": OTHER} if event.attempt else {})}
        return {"parameters": own, "trained": [*own]}

    def step(event: Event) -> dict[str, Any] | None:
        return {"losses": [9.9]} if event.attempt and event.step == 1 else None

    run = trainer(kills=KILL, named=True, state_seen=True).record()
    run, twin = _edited(_edited(run, Kind.BEGUN, begun), Kind.STEP, step), trainer(named=True, state_seen=True).record()
    told = "other parameters are trained than before: the parameters head.weight are trained, and were not"
    assert told in (reason := LossContinuity().judge(run, [_edited(twin, Kind.BEGUN, begun)]).reason), reason
    unknown = [replace(one, parameters=None) for one in resumes_carried(run)]
    monkeypatch.setattr(resumed_state, "resumes_carried", lambda _run: unknown)
    found = StateRestored().judge(run, [])
    assert (found.outcome, told in found.reason) == (Outcome.INCONCLUSIVE, True), found.reason
