"""Fires the faults of this rank: when the Moment of a fault has come (its attempt, step and phase), applies the fault
here, or holds the rank while the harness applies the fault from outside.

Each fault has a control page, a small file in shared memory that outlives the rank. It counts how often the fault has
fired, so that a restarted rank does not fire the fault again."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from ...protocol.agent_plan import Collectives, Moment, RankFault
from ...protocol.control_pages import ControlPage, State, wait_until
from ...protocol.wire import Kind, Phase
from ..training.learning_rates import RollbackDetector
from . import rank_site
from .rank_site import Lease, RankSite

if TYPE_CHECKING:
    from ..agent import Agent
    from ..collectives.collective_calls import Call

_NO_COUNTER = (
    "after {} steps of this attempt the job loaded a checkpoint and went on from it, and no optimizer's step counter "
    "shows with which step: use a trigger with `time` or `after`, or an earlier step"
)
_NO_BASE = "a checkpoint was loaded, and the harness did not find out with which step this attempt began"
_ANY = Collectives()
_CHECKPOINT = (Phase.CHECKPOINT_LOAD, Phase.CHECKPOINT_WRITE, Phase.CHECKPOINT_WRITTEN)


class Pending:
    """A fault of this rank that may still fire in this process."""

    def __init__(self, planned: RankFault) -> None:
        self.planned, self.when = planned, planned.when
        self.page = ControlPage(planned.page)
        self.injector: Any = None
        self.entered = 0  # how often its phase was entered: in this step, or in all steps if the Moment names none

    @property
    def has_fired(self) -> bool:
        """Whether the fault must not fire again: it has fired as often as it may, the rank died after the harness had
        released it from a hold, or the harness has called the fault off."""
        fired = self.page.read(ControlPage.FIRED)
        died_held = self.page.read(ControlPage.GO) == fired + 1
        called_off = self.page.read(ControlPage.ARMED_PID) == ControlPage.CALLED_OFF
        return died_held or called_off or (fired > 0 and fired >= self.page.read(ControlPage.ALLOWED))

    @property
    def armed(self) -> bool:
        page = self.page
        may = page.read(ControlPage.FIRED) < page.read(ControlPage.ALLOWED)
        return may and page.read(ControlPage.ARMED_PID) in (0, os.getpid())


class RankFaults:
    """The faults of this rank. `current`: those that may fire in the current step. If it is empty, a phase costs almost
    nothing."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.mine = [fault for fault in agent.plan.faults if self._is_mine(fault.when)]
        self.base: int | None = 0  # global steps before this attempt; None: unknown after a load
        self._start: int | None = 0  # the base with which the process began
        self._going_back, self._gone_back_by = RollbackDetector(), 0  # steps gone back since the last step ended
        self._lost_after: int | None = None  # steps, after which no counter has shown the number of the next step yet
        self.current: list[Pending] = []
        self._pending: list[Pending] = []
        careful = agent.careful("orders")
        self._prepare, self._due = careful(self._prepare_step), careful(self._due_in)
        self._reach, self._applied = careful(self._reach_moment), careful(self._say_applied)

    def _is_mine(self, when: Moment) -> bool:
        return when.pacer == self._agent.who.rank and when.attempt in (None, self._agent.who.attempt)

    def load(self) -> None:
        """Opens the control pages and imports the injectors, long before a fault can fire, so that firing is fast."""
        for fault in self.mine:
            try:
                pending = Pending(fault)
                if fault.source is not None:
                    pending.injector = rank_site.load(fault.source, fault.injector, fault.params)
                self._pending.append(pending)
            except Exception as error:
                self._agent.fail("orders", error)
                self._missed(fault, f"the agent could not load it: {error!r}")
        self._select_current()

    @property
    def step(self) -> int | None:
        """The current global step, counted from 1. None if it is not known."""
        return None if self.base is None else self.base + self._agent.steps_over + 1

    def loaded(self) -> None:
        """Must be called when a checkpoint was loaded: the number of the next step may change. Does nothing if no fault
        that names a step can still fire.

        Before the first step of the process, the number becomes unknown; after that step, the harness writes the
        attempt's base to the control page. Later, the number follows from the step counter of an optimizer whose state
        was loaded too."""
        if not self._waits_for_a_step():
            return
        if self._agent.steps_over == 0:
            self.base = self._start = None
            self._select_current()
        else:
            self._going_back.loaded(self._agent.steps_over)
            self._count_again()

    def puts_back(self, optimizer: Any) -> None:
        """Must be called when an optimizer is about to load a state."""
        if self._agent.steps_over:
            self._going_back.puts_back(self._agent.steps_over, optimizer)

    def was_put_back(self, optimizer: Any) -> None:
        if self._agent.steps_over:
            self._going_back.was_put_back(optimizer)
            self._count_again()

    def returned_to_start(self) -> None:
        """Must be called when the parameters are again those with which the process began, so that the steps so far
        were only a warm-up. The next step then gets the number that the first step had."""
        if self._start is not None and self.base != self._start - self._agent.steps_over:
            self.base = self._start - self._agent.steps_over
            self._select_current()

    def _waits_for_a_step(self) -> bool:
        return any(pending.when.step is not None and not pending.has_fired for pending in self._pending)

    def _count_again(self) -> None:
        """After a checkpoint and the state of an optimizer were loaded between two steps, finds the number of the next
        step from the optimizer's step counter. If no counter shows it until the job goes on, the faults that name a
        step are missed."""
        if not self._going_back.happened(self._agent.steps_over):
            return
        by = self._going_back.by
        # Another optimizer, which is put back next, may still show it.
        self._lost_after = self._agent.steps_over if by is None else None
        if self.base is not None and by is not None:
            self.base += self._gone_back_by - by
            self._gone_back_by = by
            self._select_current()

    def _miss_if_lost(self) -> None:
        """Must be called when the job goes on. If the number of the step is not known, the faults that name a step are
        missed."""
        if self._lost_after is not None:
            after, self._lost_after = self._lost_after, None
            for pending in [each for each in self._pending if each.when.step is not None and not each.has_fired]:
                self._forget(pending, _NO_COUNTER.format(after))

    def step_over(self) -> None:
        """Must be called when an iteration is over, and its event is written. Faults that are due right after it fire
        here."""
        if self._pending:
            self._prepare()
            due = [pending for pending in self.current if pending.when.phase is None and pending.when.step is not None]
            self._carry_out(due, None)
        if self._agent.lasting.on_steps:
            self._agent.lasting.step_over()

    def expects(self, phase: Phase) -> bool:
        """Whether a fault may fire in this phase of the current step."""
        return any(pending.when.phase is phase for pending in self.current)

    def enter(self, phase: Phase, call: Call | None = None) -> None:
        """Fires the faults that are due at the begin of a phase. `call`: the collective, in the phase `collective`."""
        self._carry_out(self._due(phase, call) or [], phase, call)

    def _carry_out(self, due: list[Pending], phase: Phase | None, call: Call | None = None) -> None:
        # Exceptions of an injector are not caught: they are the fault.
        for pending in due:
            site = self._reach(pending, phase, call)
            if site is not None:
                pending.injector.apply(site)
                self._applied(pending)

    def _prepare_step(self) -> None:
        self._miss_if_lost()
        self._gone_back_by = 0
        if self.base is None:
            self._ask_for_base()
        self._drop_past()
        self._select_current()

    def _due_in(self, phase: Phase, call: Call | None) -> list[Pending]:
        if phase not in _CHECKPOINT:
            self._miss_if_lost()
        return [pending for pending in self.current if self._is_due(pending, pending.when, phase, call)]

    def _is_due(self, pending: Pending, when: Moment, phase: Phase, call: Call | None) -> bool:
        if when.phase is None:
            return phase is not Phase.START and (when.step is None or phase not in _CHECKPOINT)
        if when.phase is not phase or (call and not call.matches(when.collectives or _ANY)):
            return False
        pending.entered += 1
        # With a step: exactly at the nth time. Without one: at the first chance from the nth time on.
        return pending.entered == when.nth or (when.step is None and pending.entered > when.nth)

    def _select_current(self) -> None:
        step = self.step
        self.current = [pending for pending in self._pending if pending.when.step is None or pending.when.step == step]
        for pending in self.current:
            if pending.when.step is not None:
                pending.entered = 0

    def _reach_moment(self, pending: Pending, phase: Phase | None, call: Call | None) -> RankSite | None:
        """Handles a fault whose Moment has come: waits until the harness has armed the fault. Then returns the site at
        which the injector is applied or, for a fault from outside, holds the rank and returns None. Also returns None
        if the fault does not fire."""
        if pending.when.step is None and phase is not Phase.START:
            if not pending.armed:
                return None  # it becomes due as soon as the harness arms it
        elif pending.has_fired:
            self._drop(pending)
            return None
        elif not wait_until(lambda: pending.armed or pending.has_fired, time.monotonic() + pending.when.hold_s):
            self._forget(
                pending, "not armed in time: the rank reached the moment of the fault and waited as long as it may"
            )
            return None
        else:
            self._drop(pending)
            if not pending.armed:  # called off while the rank waited
                return None
        if pending.injector is None:
            self._hold(pending, phase)
            return None
        page, fault = pending.page, pending.planned.fault
        page.write(ControlPage.FIRED, page.read(ControlPage.FIRED) + 1)
        page.write(ControlPage.STATE, State.APPLIED)
        about = {"fault": fault, "phase": phase and phase.value, "global_step": self.step, "pid": os.getpid()}
        self._agent.emit(Kind.APPLYING, {**about, **({"collective": call.event_data()} if call else {})})
        lease = Lease(page, pending.planned.page, pending.planned.lease_s)
        return RankSite(self._agent, fault, self.step, phase, call, lease)

    def _say_applied(self, pending: Pending) -> None:
        self._agent.emit(Kind.APPLIED, {"fault": pending.planned.fault})

    def _hold(self, pending: Pending, phase: Phase | None) -> None:
        page, fault = pending.page, pending.planned.fault
        number = page.read(ControlPage.FIRED) + 1
        about = {"fault": fault, "phase": phase and phase.value, "global_step": self.step}
        self._agent.emit(Kind.HELD, about)
        page.write(ControlPage.STATE, State.HELD)
        if wait_until(lambda: page.read(ControlPage.GO) >= number, time.monotonic() + pending.when.hold_s):
            page.write(ControlPage.FIRED, number)
            page.write(ControlPage.STATE, State.RELEASED)
        else:
            page.write(ControlPage.FIRED, number)  # first: from now on the harness must not apply it
            page.write(ControlPage.STATE, State.MISSED)
            self._missed(pending.planned, "the time to hold the rank was over: the rank went on by itself")

    def _ask_for_base(self) -> None:
        """Reads from a control page how many global steps there were before this attempt. The harness knows this number
        when the first step after a load is over."""
        for pending in [each for each in self._pending if each.when.step is not None and not each.has_fired]:
            if wait_until(partial(self._base_is_known, pending), time.monotonic() + pending.when.hold_s):
                self.base = self._start = pending.page.read(ControlPage.BASE)
                return
            self._forget(pending, _NO_BASE)

    def _base_is_known(self, pending: Pending) -> bool:
        return pending.page.read(ControlPage.BASE_ATTEMPT) == self._agent.who.attempt

    def _drop_past(self) -> None:
        now = self.step
        for pending in list(self._pending):
            step, phase = pending.when.step, pending.when.phase
            if now is None or step is None or step >= now:
                continue
            if pending.has_fired:
                self._drop(pending)
            elif phase is not None and step == now - 1 and pending in self.current:
                which = " by a collective of that kind" if pending.when.collectives else ""
                times = f"was entered{which} {pending.entered} times, and the Moment is at time {pending.when.nth}"
                self._forget(pending, f"in step {step} the phase {phase.value} {times}")
            else:
                self._forget(pending, f"step {step} was over before the trigger could be established")

    def _forget(self, pending: Pending, reason: str) -> None:
        self._drop(pending)
        pending.page.write(ControlPage.STATE, State.MISSED)
        self._missed(pending.planned, reason)

    def _drop(self, pending: Pending) -> None:
        self._pending.remove(pending)
        self.current = [other for other in self.current if other is not pending]

    def _missed(self, planned: RankFault, reason: str) -> None:
        self._agent.emit(Kind.MISSED, {"fault": planned.fault, "reason": reason})
