"""An exploration that is interrupted, goes on, and is refused. No job runs: each state is resumed by a stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from explorations import choice, outcome_of, saves
from resumes import recorded

from torchaos.harness.crash_explorer import exploration as module
from torchaos.harness.crash_explorer import resume_chain
from torchaos.harness.crash_explorer.exploration import Exploration, Limits, read_outcomes
from torchaos.harness.crash_explorer.exploration_summary import ExplorationSummary
from torchaos.harness.crash_explorer.fs_model import State
from torchaos.harness.crash_explorer.fuse_mount import ReadSet
from torchaos.harness.crash_explorer.recording_log import Query
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, OutcomeClass
from torchaos.harness.crash_explorer.resume_runs import Resume
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.rundir import RunDir

Explore = Callable[..., tuple[ExplorationSummary, list[str]]]


def _resume(outcome: Outcome, reads: ReadSet | None = None) -> Resume:
    record: Any = None
    return Resume(outcome, record, reads)


class Forks:
    """Stands for resumes by ranks without the launcher."""

    in_words = ""

    def __init__(self, *_words: Any) -> None: ...
    def __call__(self, _state: State, _tracers: object = None) -> Any: ...
    def new_interpreters(self, _state: State, _again: bool, _tracers: object) -> Any: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def explore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Explore:
    """Explores: the outcomes, and the names of the states that were resumed. `stop_after`: so many."""
    recording = saves(tmp_path)

    class Recorded:
        def __init__(self, *_given: Any) -> None:
            self.now, self.run, self.twins = RunDir(tmp_path), RunDir(tmp_path), ()
            self.left: list[str] = []

        def __call__(self) -> Any:
            return recording

        def stop(self, reason: str) -> None: ...

    class Trials:
        def __init__(self, *_given: Any) -> None:
            self.recorded = recorded()

        def doubt(self) -> str:
            return doubts.get("why", "")

        def died_at(self, _state: State) -> int:
            return 7

        def close(self) -> None: ...

    doubts: dict[str, str] = {}

    def go(stop_after: int = 1000, doubt: str = "", **limits: Any) -> tuple[ExplorationSummary, list[str]]:
        doubts["why"] = doubt
        tried: list[str] = []
        found = Exploration(
            recorded().plan,
            tmp_path,
            Limits(("process-death",), **{"warm": False, **limits}),
            [],
            print,
            lambda *_told: None,
        )

        class Cold(Recorded):
            def __call__(self, state: State | None = None, again: bool = True, tracers: object = None) -> Any:
                assert state
                tried.append(state.name)
                getattr(go, "log", []).append(f"cold {state.name}")
                if len(tried) == stop_after:
                    found.stop("SIGINT")
                kind, reads = getattr(go, "cold", (OutcomeClass.RIGHT, None))
                return _resume(outcome_of(state, kind, "no"), reads)

        monkeypatch.setattr(module, "LauncherResume", Cold)
        monkeypatch.setattr(resume_chain, "failed_at_once", lambda _run: True)
        done = found()
        assert done
        return done, tried

    for name, stand_in in (("Recorded", Recorded), ("ResumeRuns", Trials)):
        monkeypatch.setattr(module, name, stand_in)
    return go


def test_an_interrupted_exploration_goes_on(explore: Explore, tmp_path: Path) -> None:
    """The state that was under way when the signal came is not counted. With the same folder, only what is left is
    tried; a third time, nothing is."""
    first, tried = explore(stop_after=3)
    assert (first.unfinished, len(tried), len(first.outcomes)) == ("SIGINT", 3, 2)
    assert first.exit_code == 2
    second, rest = explore()
    everything = [state.name for state in choice(saves(tmp_path)).states]
    assert tried[:2] + rest == everything
    assert not second.unfinished
    assert [one.state for one in second.outcomes] == everything
    assert explore()[1] == []


@pytest.mark.parametrize("warm", [False, True])
def test_a_signal_at_the_last_state_leaves_it_for_later(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """The last state is under way when the signal comes: it has no outcome, and is said to be left."""
    monkeypatch.setattr(module, "WarmResumes", Forks)
    everything = [state.name for state in choice(saves(tmp_path)).states]
    found, tried = explore(stop_after=len(everything), warm=warm)
    assert (tried, found.unfinished) == (everything, "SIGINT")
    assert [outcome.state for outcome in found.outcomes] == everything[:-1]


def test_forked_ranks_are_compared_with_a_state_that_is_right(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exploration that goes on may begin with states that fail: it compares with a state that it had found right."""
    given: list[State | None] = []

    class Warm(Forks):
        def __init__(self, *words: Any) -> None:
            given.append(words[-1])

        def __call__(self, _state: State, _tracers: object = None) -> None: ...

    monkeypatch.setattr(module, "WarmResumes", Warm)
    explore(stop_after=3, warm=True)
    explore(warm=True)
    assert given == [None, choice(saves(tmp_path)).states[0]]


def test_minutes_end_it_between_two_states(explore: Explore, tmp_path: Path) -> None:
    """When the time is over, no further state is begun, and it is said; what was tried is kept."""
    found, tried = explore(minutes=1e-9)
    assert (found.unfinished, tried) == ("--minutes 1e-09 is over", [])
    assert read_outcomes(tmp_path) == {}
    assert not explore(minutes=100.0)[0].unfinished


def test_what_can_t_be_judged_is_refused_before_a_resume(explore: Explore) -> None:
    """A job that gives something else in each run is told so at once, and not once for each state."""
    with pytest.raises(UsageError, match="no resume can be judged, as a run without any death is not: loss_continuity"):
        explore(doubt="loss_continuity: the loss differs")


def test_failures_of_forked_ranks_are_started_cold_after_all_states(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure of each class gets a cold start at once; forked ranks try all other states before the next cold
    start, which takes much longer. An interrupted exploration goes on with those that wait."""
    forked: list[str] = []
    kinds = [OutcomeClass.RIGHT, OutcomeClass.LOST_WORK, OutcomeClass.LOST_WORK, OutcomeClass.WRONG]

    class Warm(Forks):
        def __call__(self, state: State, _tracers: object = None) -> Any:
            kind = kinds[min(len(forked), 4) % 4]
            forked.append(state.name)
            return _resume(replace(outcome_of(state, kind, f"in {len(forked)}"), warm=True, from_step=5))

    monkeypatch.setattr(module, "WarmResumes", Warm)
    everything = [state.name for state in choice(saves(tmp_path)).states]
    first, cold = explore(warm=True, stop_after=2)
    assert (forked, cold) == (everything[:4], [everything[1], everything[3]])
    assert [outcome.state for outcome in first.outcomes] == everything[:3]
    assert (first.unfinished, first.exit_code) == ("SIGINT", 2)
    assert [first.unconfirmed(kind) for kind in (OutcomeClass.LOST_WORK, OutcomeClass.WRONG)] == [1, 0]
    del forked[3]  # the state under way is tried once more
    second, cold = explore(warm=True)
    assert (forked, cold) == (everything, [everything[3], everything[2]])
    assert [outcome.kind for outcome in second.outcomes] == [OutcomeClass.RIGHT] * len(everything)
    assert "forked ranks gave 'silently wrong' (in 4), and a cold start 'resumed correctly'" in second.notes[-2]


def test_one_state_of_each_class_is_confirmed_before_the_time_is_over(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time ends with the last forked resume. Every state is seen to be wrong, the first by a cold start too: the
    others count, as not confirmed, and the exploration has failed."""
    forked: list[str] = []
    everything = [state.name for state in choice(saves(tmp_path)).states]

    class Warm(Forks):
        def __call__(self, state: State, _tracers: object = None) -> Any:
            forked.append(state.name)
            return _resume(replace(outcome_of(state, OutcomeClass.WRONG, "no"), warm=True, from_step=5))

    monkeypatch.setattr(module, "WarmResumes", Warm)
    monkeypatch.setattr(Exploration, "_kept", lambda _self, _runs, _state, found, _before: found)
    over = property(lambda _self: "" if len(forked) < len(everything) else "the time is over")
    monkeypatch.setattr(Exploration, "_over", over)
    monkeypatch.setattr(explore, "cold", (OutcomeClass.WRONG, None), raising=False)
    found, cold = explore(warm=True)
    assert (forked, cold) == (everything, everything[:1])
    assert [outcome.kind for outcome in found.outcomes] == [OutcomeClass.WRONG] * len(everything)
    assert found.unconfirmed(OutcomeClass.WRONG) == len(everything) - 1
    assert (found.exit_code, found.unfinished) == (1, "the time is over")


def test_a_failure_before_the_first_step_stands_for_all_states_that_look_the_same(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job only lists the names, and fails if last.pt is there: after one forked and one cold start, no other state
    with these names is resumed, also after an interruption. A state with other names is resumed."""
    forked: list[str] = []

    class Warm(Forks):
        def __call__(self, state: State, _tracers: object = None) -> Any:
            forked.append(state.name)
            kind = OutcomeClass.WONT_START if "last.pt" in state.tree.files else OutcomeClass.RIGHT
            return _resume(replace(outcome_of(state, kind, "no"), warm=True))

    monkeypatch.setattr(module, "WarmResumes", Warm)
    states = choice(saves(tmp_path)).states
    names = ReadSet(frozenset({(Query.NAMES, ""), (Query.IS, "nothing")}))
    monkeypatch.setattr(Exploration, "_kept", lambda _self, _runs, _state, found, _before: found)
    monkeypatch.setattr(explore, "cold", (OutcomeClass.WONT_START, names), raising=False)
    found, cold = explore(warm=True)
    by_names = {frozenset(state.tree.names[""]): state.name for state in reversed(states)}
    assert 1 < len(by_names) < len(states)
    assert forked == [state.name for state in states if state.name in by_names.values()]
    assert cold == [name for name in forked if name != states[0].name]
    failed = [OutcomeClass.WONT_START] * (len(states) - 1)
    assert [outcome.kind for outcome in found.outcomes] == [OutcomeClass.RIGHT, *failed]
    alike = [outcome for outcome in found.outcomes if outcome.like]
    assert len(alike) == len(states) - len(forked)
    assert all(outcome.like in cold and not outcome.warm for outcome in alike)
    assert found.notes[-1].startswith(f"{len(alike)} states were not resumed: ")
    kept = (tmp_path / "outcomes.jsonl").read_text().splitlines()
    (tmp_path / "outcomes.jsonl").write_text("\n".join(line for line in kept if '"like": ""' in line) + "\n")
    again, cold = explore(warm=True)
    assert (cold, again.outcomes) == ([], found.outcomes)


def test_a_failure_that_came_once_stands_for_no_other_state(
    explore: Explore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without forked ranks, and without a second start, one failed start may be chance, such as a port that is in use.
    All states are resumed."""
    monkeypatch.setattr(Exploration, "_kept", lambda _self, _runs, _state, found, _before: found)
    monkeypatch.setattr(
        explore, "cold", (OutcomeClass.WONT_START, ReadSet(frozenset({(Query.NAMES, "")}))), raising=False
    )
    found, cold = explore()
    assert cold == [state.name for state in choice(saves(tmp_path)).states]
    assert not any(outcome.like for outcome in found.outcomes)


def test_cold_starts_that_stand_for_no_other_state_come_last(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job reads every file, so no state is like another one. After the first cold start shows that, forked ranks
    try all states before the next cold start."""
    log: list[str] = []

    class Warm(Forks):
        def __call__(self, state: State, _tracers: object = None) -> Any:
            log.append(state.name)
            return _resume(replace(outcome_of(state, OutcomeClass.WONT_START, "no"), warm=True))

    monkeypatch.setattr(module, "WarmResumes", Warm)
    monkeypatch.setattr(Exploration, "_kept", lambda _self, _runs, _state, found, _before: found)
    states = choice(saves(tmp_path)).states
    asked = {(Query.NAMES, ""), *((Query.BYTES, path) for state in states for path in state.tree.files)}
    monkeypatch.setattr(explore, "cold", (OutcomeClass.WONT_START, ReadSet(frozenset(asked))), raising=False)
    monkeypatch.setattr(explore, "log", log, raising=False)
    found, cold = explore(warm=True)
    everything = [state.name for state in states]
    assert cold == everything
    assert log == [
        everything[0],
        f"cold {everything[0]}",
        *everything[1:],
        *(f"cold {name}" for name in everything[1:]),
    ]
    assert not any(outcome.like for outcome in found.outcomes)


def test_a_failure_that_the_launcher_has_shown_is_shown_again_by_new_interpreters(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher shows the first failure of its kind. From then on, new interpreters start the states that failed by
    forked ranks, unless they show something else: then the launcher decides."""
    started: list[str] = []

    class Warm(Forks):
        def __call__(self, state: State, _tracers: object = None) -> Any:
            return _resume(replace(outcome_of(state, OutcomeClass.WONT_START, "no"), warm=True))

        def new_interpreters(self, state: State, again: bool, _tracers: object) -> Any:
            assert again
            started.append(state.name)
            return _resume(
                outcome_of(state, OutcomeClass.RIGHT if len(started) == 2 else OutcomeClass.WONT_START, "no")
            )

    monkeypatch.setattr(module, "WarmResumes", Warm)
    monkeypatch.setattr(Exploration, "_kept", lambda _self, _runs, _state, found, _before: found)
    monkeypatch.setattr(explore, "cold", (OutcomeClass.WONT_START, None), raising=False)
    found, cold = explore(warm=True)
    everything = [state.name for state in choice(saves(tmp_path)).states]
    assert started == everything[1:]
    assert cold == [everything[0], everything[2]]
    assert {outcome.kind for outcome in found.outcomes} == {OutcomeClass.WONT_START}
    assert not any(outcome.warm for outcome in found.outcomes)


@pytest.mark.parametrize(("same_words", "has_time"), [(True, True), (True, False), (False, True)])
def test_a_failure_with_words_that_a_cold_start_has_shown_is_started_cold_last(
    explore: Explore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_words: bool, has_time: bool
) -> None:
    """Forked ranks fail from all states in one way. If they print the same words, one cold start shows the failure for
    all, and the other states are started cold if there is time. If they print other words each time, as when another
    rank fails, a failure counts only after its cold start."""
    forked: list[str] = []
    everything = [state.name for state in choice(saves(tmp_path)).states]

    class Warm(Forks):
        def __call__(self, state: State, _tracers: object = None) -> Any:
            forked.append(state.name)
            printed = "words" if same_words else state.name
            return _resume(replace(outcome_of(state, OutcomeClass.WONT_START, "no"), warm=True, printed=printed))

    def over(_self: Exploration) -> str:
        return "" if has_time or len(forked) < len(everything) else "the time is over"

    monkeypatch.setattr(module, "WarmResumes", Warm)
    monkeypatch.setattr(Exploration, "_kept", lambda _self, _runs, _state, found, _before: found)
    monkeypatch.setattr(Exploration, "_over", property(over))
    monkeypatch.setattr(explore, "cold", (OutcomeClass.WONT_START, None), raising=False)
    found, cold = explore(warm=True)
    assert forked == everything
    assert [outcome.kind for outcome in found.outcomes] == [OutcomeClass.WONT_START] * len(everything)
    assert cold == (everything if has_time else everything[:1])
    assert {outcome.shown_by for outcome in found.outcomes[1:]} == ({""} if has_time else {forked[0]})
    assert (found.exit_code, found.unfinished) == (1, "")
