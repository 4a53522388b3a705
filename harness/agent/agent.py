"""The object that all hooks of a rank share: its plan, its event file, its step count, and which hooks still work."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable, Mapping, TypeVar

from ..protocol import wire
from ..protocol.agent_plan import AgentPlan
from .injection.rank_faults import RankFaults
from .injection.rank_site import LastingFaults
from .job_signals import raise_if_of_the_job
from .training.step_counter import Epochs, Phases, Tally

if TYPE_CHECKING:
    from .collectives.collective_calls import Call
    from .startup import Identity

Function = TypeVar("Function", bound=Callable[..., Any])

# The hook that sees that the job enters a phase. The planner adds hooks that every rank needs (`_HOOKS_OF_TRIGGER`).
_HOOK_THAT_ENTERS = {
    wire.Phase.START: "steps",
    wire.Phase.DATA: "samples",
    wire.Phase.FORWARD: "samples",
    wire.Phase.BACKWARD: "steps",
    wire.Phase.COLLECTIVE: "collectives",
    wire.Phase.OPTIMIZER: "steps",
    wire.Phase.CHECKPOINT_WRITE: "checkpoints",
    wire.Phase.CHECKPOINT_WRITTEN: "checkpoints",
    wire.Phase.CHECKPOINT_LOAD: "checkpoints",
    wire.Phase.NEW_EPOCH: "samples",
}


class Agent:
    """The agent of one rank. Every hook first checks `on`, which is False in forked children and after the agent has
    switched itself off. A forked child still reports its saves of checkpoints, in the event file of the rank: see
    `sees_saves`."""

    def __init__(self, plan: AgentPlan, who: Identity, events: wire.EventFile) -> None:
        self.plan, self.who, self.on = plan, who, True
        self.child: int | None = None  # the pid of this process, if the rank forked it
        self._events, self.emit_step = events, events.emit_step
        self.broken: set[str] = set()  # hooks that failed
        self.thread = threading.get_ident()  # the thread that trains
        self.steps_over = 0  # iterations completed in this attempt
        self.backwards = 0  # backwards that began while no optimizer of torch's had stepped
        self.loads = 0  # checkpoint files that were loaded
        self.saves = 0  # checkpoint files whose save began
        self.put_back = 0  # calls of load_state_dict for what the job trains
        self.sees_forwards = False  # the hooks see the forwards of the models that the job trains
        self.phases, self.tally = Phases(), Tally()
        self.made: dict[int, weakref.ref[Any]] = {}  # optimizers, by id
        self.lasting = LastingFaults()
        self.look_for_saves: Callable[[], Any] | None = None  # called when a backward, step or rename begins
        # Called in each phase that may be the first of a step, while the state at the start of a step is wanted.
        self.state_begins: Callable[..., Any] | None = None
        # Checks whether the job has changed its parameters. Set only in a job without an optimizer of torch's, after a
        # backward. Called when a batch is fetched, and when a forward, backward, save or load begins; with False if
        # other values may be in place, such as an average, because the job may be about to save or to evaluate.
        self.changed: Callable[[bool], None] | None = None
        self.reached: Callable[[], list[Any]] = list  # in such a job: the parameters that its losses depend on
        # Beside an optimizer of torch's: the parameters that optimizers of plain classes train.
        self.trained_beside: Callable[[], list[Any]] = list
        self.faults = RankFaults(self)
        self.epochs = Epochs(self)
        self.hooks = self._wanted()
        self.live = set(self.hooks)  # hooks in service
        self.unseen = set(self.hooks)  # hooks that have not fired yet

    @property
    def optimizers(self) -> list[Any]:
        """The living optimizers in the order in which they were made, which is the same in all ranks and runs."""
        return [alive for ref in list(self.made.values()) if (alive := ref()) is not None]

    def _wanted(self) -> tuple[str, ...]:
        """The hooks that the plan names, and the hooks that the faults of this rank need."""
        wanted = {"steps", *self.plan.hooks}
        for fault in self.faults.mine:
            if fault.when.step is not None:
                wanted.add("checkpoints")  # loading a checkpoint changes the number of the next step
            if fault.when.phase is not None:
                wanted.add(_HOOK_THAT_ENTERS[fault.when.phase])
        return tuple(sorted(wanted))

    def emit(self, kind: wire.Kind, data: Mapping[str, Any], step: int | None = None) -> wire.Event:
        """Writes an event. `step`: by default, the number of iterations completed in this attempt."""
        return self._events.emit(kind, data, step=self.steps_over if step is None else step)

    def fail(self, hook: str, error: BaseException) -> None:
        """Switches one hook off and reports the error, once per hook. The job continues. Raises the error again if a
        signal handler of the job raised it."""
        raise_if_of_the_job(error)
        if hook in self.broken:
            return
        self.broken.add(hook)
        self.live.discard(hook)
        if hook == "steps":  # all other hooks depend on this one
            self.on = False
        try:
            self.emit(wire.Kind.AGENT_FAILED, {"hook": hook, "error": f"{type(error).__name__}: {error}"})
        except Exception as second:
            self.on = False
            print(f"torchaos: the agent stepped aside: {error!r}, {second!r}", file=sys.stderr)

    def careful(self, hook: str) -> Callable[[Function], Function]:
        """A decorator for the agent's own work inside a hook: an error in it disables the hook, never the job."""

        def decorate(function: Function) -> Function:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if hook in self.broken:
                    return None
                try:
                    return function(*args, **kwargs)
                except Exception as error:
                    self.fail(hook, error)
                    return None

            return call  # type: ignore[return-value]

        return decorate

    @property
    def sees_saves(self) -> bool:
        """Whether this process reports its saves: it is the rank, or a child that the rank forked."""
        return (self.on or self.child is not None) and "checkpoints" in self.live

    def is_forked_child(self) -> None:
        if self.on or self.child is not None:
            self.on, self.child, self.thread = False, os.getpid(), 0

    def saw(self, hook: str) -> None:
        self.unseen.discard(hook)

    def enter(self, phase: wire.Phase, call: Call | None = None) -> None:
        """Must be called when a phase begins in this rank. A fault may fire here; the exceptions that it raises go to
        the job."""
        self.phases.enter(phase)
        try:
            if self.faults.current:
                self.faults.enter(phase, call)
            if call is not None and self.lasting.on_calls:
                self.lasting.enter(call)
        except BaseException:
            self.phases.leave(phase)  # the job may catch the exception, and train on
            raise

    def starts(self) -> None:
        """Must be called when the process has imported torch and not used it yet. A fault may fire here, as in
        `enter`."""
        if self.faults.current:
            self.faults.enter(wire.Phase.START)

    def started(self, torch_version: str | None) -> None:
        """Emits the event that describes this rank. `torch_version`: None if the rank never imported torch."""
        import platform

        data = {
            "pid": self.who.pid, "start_ticks": wire.start_ticks(self.who.pid), "local_rank": self.who.local_rank,
            "world_size": self.who.world_size, "python": platform.python_version(), "torch": torch_version,
            "hooks": list(self.hooks), "group": ":".join(os.environ.get(n, "") for n in ("MASTER_ADDR", "MASTER_PORT")),
        }  # fmt: skip
        if os.environ.get(wire.ENV_NODE, "").isdigit():
            data["node"] = int(os.environ[wire.ENV_NODE])
        if os.environ.get(wire.ENV_REPLICA, "").isdigit():
            data["replica"] = int(os.environ[wire.ENV_REPLICA])
        self.emit(wire.Kind.AGENT_STARTED, data)

    def ended(self) -> None:
        if self.on and os.getpid() == self.who.pid:
            self.emit(wire.Kind.AGENT_ENDED, {"unseen": sorted(self.unseen)})
