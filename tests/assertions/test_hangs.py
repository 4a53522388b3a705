"""hang_detected and culprit_identified, on journals made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.culprit_identified import CulpritIdentified
from torchaos.assertions.hang_detected import HangDetected
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Need, Outcome
from torchaos.harness.protocol.wire import FIELDS, Event, Kind
from torchaos.harness.record.record import Record
from torchaos.harness.scenario.checks import check_parameters

PASSED, FAILED, INCONCLUSIVE = Outcome.PASSED, Outcome.FAILED, Outcome.INCONCLUSIVE


class Made:
    """A journal: each call adds an event."""

    def __init__(self, trainer: Any) -> None:
        self._plan = trainer(steps=1).record().plan
        self._events: list[Event] = []
        self._collect: tuple[Need, ...] = (Need.HANGS,)
        self.artifacts: dict[str, Any] = {}

    def add(self, at_s: float, kind: Kind, rank: int | None = None, **data: Any) -> Made:
        assert FIELDS[kind] <= data.keys()
        self._events.append(Event(kind, "harness", len(self._events), 0.0, at_s, rank, 0, None, data))
        return self

    def hit(self, at_s: float, *ranks: int, fault: str = "stall") -> Made:
        for rank in ranks:
            self.add(at_s, Kind.APPLYING, rank, fault=fault, phase=None, global_step=5, pid=10 + rank)
        return self

    def back(self, at_s: float, fault: str = "stall") -> Made:
        return self.add(at_s, Kind.ROLLED_BACK, fault=fault, verified=True)

    def declared(self, at_s: float, *ranks: int) -> Made:
        self.add(at_s - 0.5, Kind.HANG_SUSPECTED, observer="log", ranks=[], since_s=at_s - 1.0)
        return self.add(at_s, Kind.HANG_DECLARED, observers=["log", "stacks"], ranks=list(ranks), since_s=at_s - 1.0)

    def opinion(self, at_s: float, observer: str, opinion: str, bound_s: float = 0.8, detail: str = "") -> Made:
        data: dict[str, Any] = {
            "observer": observer,
            "opinion": opinion,
            "quiet_s": 1.0,
            "bound_s": bound_s,
            "detail": detail,
        }
        return self.add(at_s, Kind.HANG_OPINION, **data)

    def restarted(self, at_s: float, *ranks: int) -> Made:
        """The rank that was hit dies, and the next attempt's ranks are up."""
        self.add(at_s - 1.0, Kind.RANK_EXITED, 1, pid=11, start_ticks=1, exit_code=-9)
        for rank in ranks:
            data: dict[str, Any] = {
                "pid": 20 + rank,
                "start_ticks": 1,
                "local_rank": rank,
                "world_size": len(ranks),
                "node": 0,
            }
            self.add(at_s, Kind.RANK_UP, rank, **data)
            self._events[-1] = replace(self._events[-1], attempt=1)
        return self

    def watchdog(self, at_s: float) -> Made:
        return self.add(at_s, Kind.LOG_CAUSE, cause="gloo-timeout", line="Timed out waiting", advice="")

    def unwatched(self) -> Made:
        self._collect = ()
        return self

    @property
    def run(self) -> Record:
        return Record(replace(self._plan, collect=self._collect), tuple(self._events), self.artifacts)


@pytest.fixture
def made(trainer: Any) -> Made:
    return Made(trainer)


def test_who_and_how_fast(made: Made) -> None:
    """The first one to notice is named, with the time since the fault; each bound is judged by its own."""
    run = made.hit(10.0, 1).declared(11.5, 1).watchdog(18.0).back(20.0).run
    assert isinstance(HangDetected(), Assertion)
    finding = HangDetected().judge(run, [])
    assert (finding.outcome, finding.reason) == (PASSED, "our observers noticed 1.50 s after the fault")
    assert HangDetected(within=1.0).judge(run, []).outcome is FAILED
    assert HangDetected(within=2.0, suspected_within=1.0).judge(run, []).outcome is PASSED
    assert HangDetected(suspected_within=0.5).judge(run, []).outcome is FAILED
    assert HangDetected(by="job", within=5.0).judge(run, []).outcome is FAILED
    assert HangDetected(by="job", within=9.0).judge(run, []).outcome is PASSED


def test_nobody_noticed(made: Made) -> None:
    """A stall that lasted, and that nobody noticed, fails; one that was taken back before the bound shows nothing."""
    run = made.hit(10.0, 1).back(20.0).run
    assert HangDetected().judge(run, []).outcome is FAILED
    assert HangDetected(within=5.0).judge(run, []).outcome is FAILED
    assert HangDetected(within=15.0).judge(run, []).outcome is INCONCLUSIVE


def test_only_the_right_one_counts(made: Made) -> None:
    """Where the job itself has to notice, our observers don't help; the reason says that they did."""
    finding = HangDetected(by="job").judge(made.hit(10.0, 1).declared(11.0, 1).back(20.0).run, [])
    assert finding.outcome is FAILED
    assert "only our observers did" in finding.reason


def test_an_alarm_before_the_fault_is_false(made: Made) -> None:
    """It does not count as having noticed, and it is measured."""
    finding = HangDetected().judge(made.declared(5.0, 1).hit(10.0, 1).back(20.0).run, [])
    assert (finding.outcome, finding.measured["false_alarms"]) == (FAILED, 1)


def test_every_stall_must_be_noticed(made: Made) -> None:
    """Two faults one after the other, of which the second is missed."""
    run = made.hit(10.0, 1).declared(11.0, 1).back(15.0).hit(20.0, 0, fault="other").back(30.0, fault="other").run
    finding = HangDetected().judge(run, [])
    assert finding.outcome is FAILED
    assert finding.reason.startswith("other was not noticed")


def test_nothing_to_judge(made: Made, trainer: Any) -> None:
    """No fault, or no observers: inconclusive, whatever the journal says."""
    assert HangDetected().judge(made.declared(5.0).run, []).outcome is INCONCLUSIVE
    assert CulpritIdentified().judge(made.run, []).outcome is INCONCLUSIVE
    blind = Made(trainer).hit(10.0, 1).watchdog(12.0).back(20.0).unwatched()
    assert HangDetected().judge(blind.run, []).outcome is INCONCLUSIVE
    assert HangDetected(by="job").judge(blind.run, []).outcome is PASSED
    assert CulpritIdentified().judge(blind.run, []).outcome is INCONCLUSIVE


@pytest.mark.parametrize(
    ("named", "expected"), [((1, 3), PASSED), ((1,), FAILED), ((1, 2, 3), FAILED), ((), FAILED), ((0, 2), FAILED)]
)
def test_all_of_them_and_no_other(made: Made, named: tuple[int, ...], expected: Outcome) -> None:
    """The bounds are 1 by default: one too few fails, and one too many."""
    run = made.hit(10.0, 1, 3).declared(11.0, *named).back(20.0).run
    finding = CulpritIdentified().judge(run, [])
    assert finding.outcome is expected, finding.reason
    assert finding.measured["hit"] == [[1, 3]]


def test_looser_bounds(made: Made) -> None:
    """Half of the blamed may be wrong where the scenario says so; nobody is blamed rightly by blaming nobody."""
    run = made.hit(10.0, 1).declared(11.0, 1, 2).back(20.0).run
    assert CulpritIdentified(precision=0.5).judge(run, []).outcome is PASSED
    assert CulpritIdentified(precision=0.6).judge(run, []).outcome is FAILED


def test_not_declared_at_all(made: Made) -> None:
    """Nobody was blamed, and the reason says why."""
    finding = CulpritIdentified().judge(made.hit(10.0, 1).back(20.0).run, [])
    assert finding.outcome is FAILED
    assert "no hang was declared" in finding.reason


def test_a_stall_that_was_too_short_decides_nothing(made: Made) -> None:
    """Our observers need most of two seconds: of a stall of one, nothing follows; of a wrong blame, much."""
    short = CulpritIdentified().judge(made.hit(10.0, 1).back(11.0).run, [])
    assert (short.outcome, "lasted only 1.00 s" in short.reason) == (INCONCLUSIVE, True), short.reason
    both = made.hit(20.0, 1).declared(22.0, 1).back(30.0)
    assert CulpritIdentified().judge(both.run, []).outcome is INCONCLUSIVE
    assert CulpritIdentified().judge(both.hit(40.0, 1).declared(42.0, 0).back(50.0).run, []).outcome is FAILED


def test_how_long_a_stall_must_be_is_one_number(made: Made) -> None:
    """Both assertions say the same of a stall that was too short, and what to write; the observers' bound counts."""
    made.hit(10.0, 1).opinion(14.0, "log", "active", bound_s=30.0).back(15.0)
    detected, blamed = (one.judge(made.run, []) for one in (HangDetected(by="observers"), CulpritIdentified()))
    assert (detected.outcome, detected.reason) == (INCONCLUSIVE, blamed.reason)
    assert "it lasted only 5.00 s, and they need 31.00 s to tell a hang from the usual pauses" in detected.reason
    assert detected.reason.endswith("; let it last 35 s")
    late = HangDetected(by="observers", within=20.0).judge(made.run, [])
    assert late.reason == "stall lasted only 5.00 s, and our observers may take 20 s; let it last 25 s"


def test_a_job_with_long_pauses_takes_longer_to_hang(made: Made) -> None:
    """Its steps took four seconds before the fault: a stall of ten may be such a pause, and one of twenty is not."""
    for number, at_s in enumerate((1.0, 5.0, 9.0), 1):
        made.add(at_s, Kind.STEP, 1, **dict.fromkeys(FIELDS[Kind.STEP]) | {"phases": {}})
        made._events[-1] = replace(made._events[-1], step=number)
    assert CulpritIdentified().judge(made.hit(10.0, 1).back(20.0).run, []).outcome is INCONCLUSIVE
    assert CulpritIdentified().judge(made.hit(30.0, 1).back(50.0).run, []).outcome is FAILED


def test_the_report_of_another_tool(made: Made) -> None:
    """It is scored in the place of ours; one that can't be used is inconclusive."""
    made.hit(10.0, 1, 3).declared(11.0, 0).back(20.0)
    judge = CulpritIdentified(report="{run}/said.json").judge
    assert judge(made.run, []).outcome is INCONCLUSIVE
    for artifact, expected in (
        ({"culprits": [3, 1]}, PASSED), ({"culprits": [3]}, FAILED), ({"error": "it is not JSON"}, INCONCLUSIVE),
    ):  # fmt: skip
        made.artifacts["report"] = artifact
        assert judge(made.run, []).outcome is expected


def died(made: Made, at_s: float, *ranks: int) -> Made:
    for rank in ranks:
        made.add(at_s, Kind.RANK_EXITED, rank, pid=10 + rank, start_ticks=0, exit_code=1)
    return made


def test_the_watch_of_the_job_itself_is_its_own_time_out(made: Made) -> None:
    """Python's faulthandler says "Timeout", and the rank ends: the job noticed. The line may come after the death."""
    made.hit(10.0, 1)
    died(made, 18.0, 1).add(18.02, Kind.LOG_CAUSE, cause="faulthandler", line="Timeout (0:00:08)!", advice="")
    finding = HangDetected(by="job", within=10.0).judge(made.back(25.0).run, [])
    assert (finding.outcome, finding.reason) == (PASSED, "the job's own time-out noticed 8.02 s after the fault")


def test_a_stall_ends_with_the_rank_that_it_held_up(made: Made) -> None:
    """What is said long after that is about something else; why the rank died is not known, so nobody failed."""
    run = died(made.hit(10.0, 1), 18.0, 1).watchdog(24.0).back(25.0).run
    finding = HangDetected(by="job").judge(run, [])
    assert (finding.outcome, "ended after 8.00 s" in finding.reason) == (INCONCLUSIVE, True), finding.reason


def test_a_line_that_the_scenario_names(made: Made) -> None:
    """With `pattern` the user's own watchdog counts, and only that one; where it said nothing, nobody noticed."""
    line = "no progress on rank 1 for 5 s"
    made.hit(10.0, 1).add(15.0, Kind.LOG_CAUSE, cause="own-watchdog", line=line, pattern="no progress")
    run = died(made, 15.5, 1).back(25.0).run
    assert HangDetected(by="job", pattern="no progress").judge(run, []).outcome is PASSED
    assert HangDetected(by="job", pattern="another").judge(run, []).outcome is FAILED


def test_what_is_no_regular_expression_is_refused() -> None:
    """Where the scenario is read, in words."""
    told: list[str] = []
    check_parameters(HangDetected, {"pattern": "no progress ("}, (), lambda at, text, *more: told.append(text))
    assert len(told) == 1
    assert "not a regular expression" in told[0]


def test_a_hang_of_the_recovery_counts(made: Made) -> None:
    """The fault itself was over at once: what was to be noticed is the hang of the next attempt, from its beginning.
    Nobody knows who is to blame for it."""
    run = made.hit(10.0, 1).restarted(12.0, 0, 1).declared(20.0).back(60.0).run
    finding = HangDetected(within=5.0).judge(run, [])
    assert (finding.outcome, finding.reason) == (PASSED, "our observers noticed 1.00 s after the fault")
    assert finding.measured["noticed"][0]["fault"] == "the hang of attempt 1 after stall"
    assert HangDetected(within=0.5).judge(run, []).outcome is FAILED
    assert CulpritIdentified().judge(run, []).outcome is INCONCLUSIVE


def test_where_an_observer_was_blind_nothing_is_blamed_on_the_job(made: Made) -> None:
    """The log was silent, and what had to confirm it could not see: the reason says who was blind, and why."""
    made.hit(10.0, 1).opinion(9.0, "stacks", "blind", detail="py-spy is not installed").opinion(11.0, "log", "hangs")
    run = made.opinion(10.0, "metrics", "active", detail="rank 0 wants 0.30 of a core").back(20.0).run
    for assertion in (HangDetected(by="observers", within=5.0), CulpritIdentified()):
        finding = assertion.judge(run, [])
        assert finding.outcome is INCONCLUSIVE
        assert "stacks (py-spy is not installed)" in finding.reason
        assert "metrics active (rank 0 wants 0.30 of a core)" in finding.reason
    assert HangDetected(by="job").judge(run, []).outcome is FAILED


def test_without_stacks_nobody_is_blamed(made: Made) -> None:
    """A hang was declared, and what names a rank that sleeps in its own code could not be read; a wrong name is wrong
    all the same."""
    made.opinion(9.0, "stacks", "blind", detail="py-spy is not installed").hit(10.0, 1)
    finding = CulpritIdentified().judge(made.declared(12.0).back(20.0).run, [])
    assert (finding.outcome, "py-spy is not installed" in finding.reason) == (INCONCLUSIVE, True)
    assert CulpritIdentified().judge(made.declared(15.0, 0).run, []).outcome is FAILED


def test_observers_that_saw_everything_have_no_excuse(made: Made) -> None:
    """Nobody was blind and the log was silent for longer than its bound: not to have noticed is a failure."""
    made.hit(10.0, 1).opinion(9.0, "stacks", "active").opinion(11.0, "log", "hangs").opinion(9.0, "metrics", "active")
    assert HangDetected(by="observers").judge(made.back(20.0).run, []).outcome is FAILED


def test_a_job_that_pauses_long_needs_a_longer_stall(made: Made) -> None:
    """The observers had learned its pauses, and need more time than the stall lasted."""
    made.hit(10.0, 1).opinion(9.0, "log", "active", bound_s=30.0).opinion(9.0, "metrics", "active")
    finding = HangDetected(by="observers", within=5.0).judge(made.back(20.0).run, [])
    assert finding.outcome is INCONCLUSIVE
    assert "31.00 s" in finding.reason
