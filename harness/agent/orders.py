"""Orders and their Moments: fire in this rank, or hold it for a fault from outside.

The control page outlives the rank: what has fired is read from it, so that a restarted rank does not fire again.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

from . import injectors
from .going_back import GoingBack
from .lasting import Lease
from .page import ControlPage, State
from .plan import Moment, Order
from .site import RankSite
from .wire import Kind, Phase

if TYPE_CHECKING:
    from .agent import Agent
    from .calls import Call

_STEP_S = 0.0002  # how often a page is looked at while the rank waits
_NO_COUNTER = (
    "after {} steps of this attempt the job loaded a checkpoint and went on from it, and no optimizer's own counter "
    "says with which step: let the fault come by `time` or `after`, or in a step before that"
)
_CHECKPOINT = (Phase.CHECKPOINT_LOAD, Phase.CHECKPOINT_WRITE, Phase.CHECKPOINT_WRITTEN)


class Pending:
    """An order of this rank that may still fire in this process."""

    def __init__(self, order: Order) -> None:
        self.order, self.when = order, order.when
        self.page = ControlPage(order.page)
        self.injector: Any = None
        self.entered = 0  # how often its phase was entered: in the step, or in all where no step is named

    @property
    def has_fired(self) -> bool:
        """As often as it is allowed to; or the rank that was held for it was let go, and did not live to say so; or the
        harness has called it off."""
        fired = self.page.read(ControlPage.FIRED)
        died_held = self.page.read(ControlPage.GO) == fired + 1
        called_off = self.page.read(ControlPage.ARMED_PID) == ControlPage.CALLED_OFF
        return died_held or called_off or (fired > 0 and fired >= self.page.read(ControlPage.ALLOWED))

    @property
    def armed(self) -> bool:
        page = self.page
        may = page.read(ControlPage.FIRED) < page.read(ControlPage.ALLOWED)
        return may and page.read(ControlPage.ARMED_PID) in (0, os.getpid())


class Orders:
    """`hot` holds the orders that may come up in the step under way; while it is empty a phase costs one look."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.mine = [order for order in agent.plan.orders if self._is_mine(order.when)]
        self.base: int | None = 0  # global steps before this attempt's first; None: a checkpoint was loaded
        self._going_back, self._gone_back_by = GoingBack(), 0  # since the last step was over
        self.hot: list[Pending] = []
        self._pending: list[Pending] = []
        careful = agent.careful("orders")
        self._prepare, self._due = careful(self._prepare_step), careful(self._due_in)
        self._reach, self._applied = careful(self._reach_moment), careful(self._say_applied)

    def _is_mine(self, when: Moment) -> bool:
        return when.pacer == self._agent.who.rank and when.attempt in (None, self._agent.who.attempt)

    def load(self) -> None:
        """Open the pages and import the injectors, long before any Moment, so that firing is quick."""
        for order in self.mine:
            try:
                pending = Pending(order)
                if order.source is not None:
                    pending.injector = injectors.load(order.source, order.injector, order.params)
                self._pending.append(pending)
            except Exception as error:
                self._agent.fail("orders", error)
                self._missed(order, f"the agent could not load it: {error!r}")
        self._heat()

    @property
    def step(self) -> int | None:
        """The global step under way, from 1."""
        return None if self.base is None else self.base + self._agent.steps_over + 1

    def loaded(self) -> None:
        """A checkpoint was loaded: before the first step, that moves the count by what only the harness can tell."""
        if not self._waits_for_a_step():
            return
        if self._agent.steps_over == 0:
            self.base = None
            self._heat()
        else:
            self._going_back.loaded(self._agent.steps_over)
            self._count_again()

    def puts_back(self, optimizer: Any) -> None:
        """An optimizer is about to load a state."""
        if self._agent.steps_over:
            self._going_back.puts_back(self._agent.steps_over, optimizer)

    def was_put_back(self, optimizer: Any) -> None:
        if self._agent.steps_over:
            self._going_back.was_put_back(optimizer)
            self._count_again()

    def _waits_for_a_step(self) -> bool:
        return any(one.when.step is not None and not one.has_fired for one in self._pending)

    def _count_again(self) -> None:
        """Between two steps a checkpoint was loaded, and the state of an optimizer from it: what comes next is the step
        that the optimizer's own counter says. Where it says none, the harness would learn it too late."""
        if not self._going_back.happened(self._agent.steps_over):
            return
        by = self._going_back.by
        if self.base is not None and by is not None:
            self.base += self._gone_back_by - by
            self._gone_back_by = by
            self._heat()
        elif by is None:
            for one in [one for one in self._pending if one.when.step is not None and not one.has_fired]:
                self._forget(one, _NO_COUNTER.format(self._agent.steps_over))

    def step_over(self) -> None:
        """An iteration is over, and its event is written. May fire what is due right after it."""
        if self._pending:
            self._prepare()
            self._carry_out([one for one in self.hot if one.when.phase is None and one.when.step is not None], None)
        if self._agent.lasting.on_steps:
            self._agent.lasting.step_over()

    def expects(self, phase: Phase) -> bool:
        """Whether something may come up in it."""
        return any(one.when.phase is phase for one in self.hot)

    def enter(self, phase: Phase, call: Call | None = None) -> None:
        """A phase begins; where it is `collective`, of this call. May fire what is due in it."""
        self._carry_out(self._due(phase, call) or [], phase, call)

    def _carry_out(self, due: list[Pending], phase: Phase | None, call: Call | None = None) -> None:
        # Nothing here catches what an injector raises: that is the fault.
        for one in due:
            site = self._reach(one, phase, call)
            if site is not None:
                one.injector.apply(site)
                self._applied(one)

    def _prepare_step(self) -> None:
        self._gone_back_by = 0
        if self.base is None:
            self._ask_for_base()
        self._drop_what_is_past()
        self._heat()

    def _due_in(self, phase: Phase, call: Call | None) -> list[Pending]:
        return [one for one in self.hot if self._is_due(one, one.when, phase, call)]

    def _is_due(self, one: Pending, when: Moment, phase: Phase, call: Call | None) -> bool:
        if when.phase is None:
            return phase is not Phase.START and (when.step is None or phase not in _CHECKPOINT)
        if when.phase is not phase or (when.collectives and call and not call.matches(when.collectives)):
            return False
        one.entered += 1
        # In a step, exactly the nth time; where no step is named, the first chance from the nth time on.
        return one.entered == when.nth or (when.step is None and one.entered > when.nth)

    def _heat(self) -> None:
        step = self.step
        self.hot = [one for one in self._pending if one.when.step is None or one.when.step == step]
        for one in self.hot:
            if one.when.step is not None:
                one.entered = 0

    def _reach_moment(self, one: Pending, phase: Phase | None, call: Call | None) -> RankSite | None:
        """The Moment is there: wait for the word if it never came yet, then hold, or return where to fire."""
        if one.when.step is None and phase is not Phase.START:
            if not one.armed:
                return None  # it becomes due whenever the harness arms it
        elif one.has_fired:
            self._drop(one)
            return None
        elif not _wait(lambda: one.armed or one.has_fired, one.when.hold_s):
            self._forget(one, "not armed in time: the rank reached the Moment and waited as long as it may")
            return None
        else:
            self._drop(one)
            if not one.armed:  # called off while it was waited for
                return None
        if one.injector is None:
            self._hold(one, phase)
            return None
        page, fault = one.page, one.order.fault
        page.write(ControlPage.FIRED, page.read(ControlPage.FIRED) + 1)
        page.write(ControlPage.STATE, State.APPLIED)
        about = {"fault": fault, "phase": phase and phase.value, "global_step": self.step, "pid": os.getpid()}
        self._agent.emit(Kind.APPLYING, {**about, **({"collective": call.told()} if call else {})})
        return RankSite(self._agent, fault, self.step, phase, call, Lease(page, one.order.page, one.order.lease_s))

    def _say_applied(self, one: Pending) -> None:
        self._agent.emit(Kind.APPLIED, {"fault": one.order.fault})

    def _hold(self, one: Pending, phase: Phase | None) -> None:
        page, fault = one.page, one.order.fault
        number = page.read(ControlPage.FIRED) + 1
        about = {"fault": fault, "phase": phase and phase.value, "global_step": self.step}
        self._agent.emit(Kind.HELD, about)
        page.write(ControlPage.STATE, State.HELD)
        if _wait(lambda: page.read(ControlPage.GO) >= number, one.when.hold_s):
            page.write(ControlPage.FIRED, number)
            page.write(ControlPage.STATE, State.RELEASED)
        else:
            page.write(ControlPage.FIRED, number)  # first: from here on the harness must not apply it any more
            page.write(ControlPage.STATE, State.MISSED)
            self._missed(one.order, "hold expired: the rank went on by itself")

    def _ask_for_base(self) -> None:
        """The first step after a load is over: the harness can now tell from it how many global steps lie before."""
        for one in [one for one in self._pending if one.when.step is not None and not one.has_fired]:
            if _wait(partial(self._is_told_base, one), one.when.hold_s):
                self.base = one.page.read(ControlPage.BASE)
                return
            self._forget(one, "no base: a checkpoint was loaded, and nobody said with which step this attempt began")

    def _is_told_base(self, one: Pending) -> bool:
        return one.page.read(ControlPage.BASE_ATTEMPT) == self._agent.who.attempt

    def _drop_what_is_past(self) -> None:
        now = self.step
        for one in list(self._pending):
            step, phase = one.when.step, one.when.phase
            if now is None or step is None or step >= now:
                continue
            if one.has_fired:
                self._drop(one)
            elif phase is not None and step == now - 1 and one in self.hot:
                which = " by a collective of that kind" if one.when.collectives else ""
                times = f"was entered{which} {one.entered} times, and the Moment is at time {one.when.nth}"
                self._forget(one, f"in step {step} the phase {phase.value} {times}")
            else:
                self._forget(one, f"step {step} was over before the trigger could be established")

    def _forget(self, one: Pending, reason: str) -> None:
        self._drop(one)
        one.page.write(ControlPage.STATE, State.MISSED)
        self._missed(one.order, reason)

    def _drop(self, one: Pending) -> None:
        self._pending.remove(one)
        self.hot = [other for other in self.hot if other is not one]

    def _missed(self, order: Order, reason: str) -> None:
        self._agent.emit(Kind.MISSED, {"fault": order.fault, "reason": reason})


def _wait(found: Callable[[], bool], limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not found():
        if time.monotonic() >= end:
            return False
        time.sleep(_STEP_S)
    return True
