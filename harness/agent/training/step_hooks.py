"""The hooks of backwards and optimizer steps. They feed the counter (step_counter.py), and have the event of
each iteration written (step_events.py)."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Sequence
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any, Callable

from ...protocol.wire import Kind, Phase
from ..agent import Agent
from ..batches.batch_ring import UNSEEN, TrainedBatches
from ..job_signals import raise_if_of_the_job
from .learning_rates import CounterOffset, LearningRates, optimizer_step
from .plain_optimizers import PlainOptimizers, UpdateDetector
from .step_counter import NOTHING, Closed, OptimizerTurns, Segment, StepCounter
from .step_events import Losses, StepEvents

_PLAIN = "plain"  # the key of all optimizers together that are none of torch's
_NO_STEP = (
    "the agent saw {} and no optimizer step: {}. Make the optimizer a subclass of "
    "torch.optim.Optimizer, or let the job print its steps, such as `step 12 loss 3.4`"
)
_NEVER_STEPPED = "no optimizer of torch's stepped, though the job made one"
_NO_CHANGE = "it is none of torch's, and no parameter that a loss reached was seen to change between them"
_FROM_A_THREAD = (
    "a thread of the job fetches batches ahead, and it could not be seen which of them the loop took from it"
)


class StepHooks:
    def __init__(self, agent: Agent, losses: Losses, rates: LearningRates, trained: TrainedBatches) -> None:
        self._agent, self._losses, self._rates, self._trained = agent, losses, rates, trained
        self._events, self._ahead = StepEvents(agent, losses), CounterOffset(agent)
        self._counter, self._cycle = StepCounter(), OptimizerTurns(agent.who.attempt, agent.who.rank)
        self._loose = 0  # optimizers that were reported as loose
        self._said_unseen = False
        self._begun = False  # an optimizer of torch's has stepped
        self._updates, self._plain = UpdateDetector(agent), PlainOptimizers(agent)
        agent.reached = self._updates.parameters
        self._dummy = False
        self._state: Any = None
        self._nested: set[tuple[int, int]] = set()  # optimizers of which the first was seen to call the second
        self._scaled: list[bool] = []  # by GradScaler step in progress: whether the optimizer has stepped inside it
        self._skip = agent.careful("steps")(self._skipped)
        self._updated = agent.careful("steps")(self._parameters_changed)

    def watch_state(self, state: Any) -> None:
        """Also records the training state after each step. `state`: a StateHook, if the plan has that hook."""
        self._state, self._events.with_state = state, True

    def patch_autograd(self, module: ModuleType) -> None:
        """Patches `torch.autograd.backward`, which Tensor.backward calls too. Also patches `torch.autograd.grad`, which
        is a backward in a job that updates its parameters by itself."""
        grad = self._cover_grad(module.grad)
        module.backward, module.grad = self._cover_backward(module.backward), grad  # type: ignore[attr-defined]

    def _cover_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        agent = self._agent
        inside_engine: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            # A backward inside a backward (reentrant checkpointing) is part of the outer one.
            if not agent.on or inside_engine() != -1:
                return original(tensors, *args, **kwargs)
            if agent.changed is not None:
                agent.changed(True)
            try:
                self._backward_begins(tensors)
            except Exception as error:
                agent.fail("steps", error)
            closed, ok = NOTHING, False
            try:
                if agent.faults.current:
                    agent.epochs.backward()
                    agent.faults.enter(Phase.BACKWARD)
                result = original(tensors, *args, **kwargs)
                ok = True
            finally:
                try:
                    closed = self._backward_ends(ok)
                except Exception as error:
                    agent.fail("steps", error)
            if closed is not NOTHING:
                self._follow(closed)
            return result

        return backward

    def _cover_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In a job without an optimizer of torch's, a gradient that is taken by a parameter counts as a backward."""
        import torch

        agent, parameter, counted = self._agent, torch.nn.Parameter, self._cover_backward(original)

        @functools.wraps(original)
        def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if agent.on and not (agent.made or self._begun):
                inputs = args[0] if args else kwargs.get("inputs")
                if any(isinstance(each, parameter) for each in (inputs if isinstance(inputs, (list, tuple)) else ())):
                    return counted(outputs, *args, **kwargs)
            return original(outputs, *args, **kwargs)

        return grad

    def patch_optimizer(self, module: ModuleType) -> None:
        """Patches torch.optim.optimizer: steps, and the calls that make, clear and load an optimizer."""
        module.register_optimizer_step_pre_hook(self._before_step)
        module.register_optimizer_step_post_hook(self._after_step)
        kind, agent = module.Optimizer, self._agent
        original, made = kind.__init__, agent.careful("steps")(self._made)

        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            made(optimizer)

        kind.__init__ = __init__
        self._before_zero_grad(kind, self._dropped)
        self._before_zero_grad(import_module("torch").nn.Module, self._cleared)
        load, put_back = kind.load_state_dict, agent.careful("steps")(self._state_loads)
        was_put_back = agent.careful("orders")(agent.faults.was_put_back)

        @functools.wraps(load)
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not agent.on:
                return load(optimizer, *args, **kwargs)
            put_back(optimizer)
            result = load(optimizer, *args, **kwargs)
            was_put_back(optimizer)
            return result

        kind.load_state_dict = load_state_dict

    def _before_zero_grad(self, owner: Any, told: Callable[[Any], None]) -> None:
        """Wraps `owner.zero_grad`, so that `told` is called before gradients of a backward are cleared."""
        agent, counter, zero, told = self._agent, self._counter, owner.zero_grad, self._agent.careful("steps")(told)

        @functools.wraps(zero)
        def zero_grad(owning: Any, *args: Any, **kwargs: Any) -> Any:
            if counter.fresh and agent.on:
                told(owning)
            return zero(owning, *args, **kwargs)

        owner.zero_grad = zero_grad

    def patch_scaler(self, module: ModuleType) -> None:
        """Patches torch.amp.grad_scaler: a step that the scaler skips is an iteration too."""
        agent, original = self._agent, module.GradScaler.step

        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not agent.on:
                return original(scaler, optimizer, *args, **kwargs)
            self._scaled.append(False)
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                stepped = self._scaled.pop()
            if not stepped:
                self._follow(self._skip(optimizer) or NOTHING)
            return result

        module.GradScaler.step = step

    # The functions from here to `_follow` run in every step. Torch has just filled the processor's caches, so a
    # function call costs much more than in a loop. Keep the calls few.

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        agent = self._agent
        if not agent.on:
            return
        try:
            self._step_begins(optimizer)
        except Exception as error:
            agent.fail("steps", error)
        agent.phases.enter(Phase.OPTIMIZER)
        if agent.faults.current:
            try:
                agent.faults.enter(Phase.OPTIMIZER)
            except BaseException:  # torch calls no hook after the step then; the job may catch it, and train on
                agent.phases.leave(Phase.OPTIMIZER)
                self._counter.step_failed(id(optimizer))
                raise

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        agent = self._agent
        if not agent.on:
            return
        agent.phases.leave(Phase.OPTIMIZER)
        try:
            closed = self._step_ends(optimizer)
        except Exception as error:
            agent.fail("steps", error)
            return
        if closed is not NOTHING:
            self._follow(closed)

    def finish(self) -> None:
        """Must be called when the process ends. Closes an iteration that was left open because a further optimizer step
        could have belonged to it."""
        if self._agent.changed is not None:
            self._agent.changed(True)
        failed = getattr(sys, "last_type", None) is not None  # Python has printed an exception that nobody caught
        if self._agent.backwards and not self._agent.steps_over and not failed:
            why = _NEVER_STEPPED if self._agent.made else _NO_CHANGE
            passes = f"{self._agent.backwards} backward pass{'es' * (self._agent.backwards > 1)}"
            text = _NO_STEP.format(passes, why)
            self._agent.emit(Kind.NOTE, {"text": text, "unseen": "steps"})
        if self._counter.finish().after:
            self._agent.careful("steps")(self._events.emit)(True)
        self._agent.careful("loss")(self._losses.poll)()

    def _key(self, optimizer: Any) -> int:
        key = id(optimizer)
        if key not in self._agent.made:
            self._agent.made[key] = weakref.ref(optimizer)
            weakref.finalize(optimizer, self._gone, key).atexit = False
        return key

    def _gone(self, key: int) -> None:
        self._agent.made.pop(key, None)
        self._nested = {pair for pair in self._nested if key not in pair}
        self._ahead.forget(key)
        self._counter.gone(key)

    def _made(self, optimizer: Any) -> None:
        self._agent.changed = None
        if self._begun and self._counter.fresh:  # the job starts again; no step will use its last gradients
            self._counter.fresh = False
            self._starts_anew()
        own = _trained_by(optimizer)
        for key, ref in list(self._agent.made.items()):
            if self._counter.has_stepped(key) and own & _trained_by(ref()):
                self._gone(key)  # the new optimizer replaces it, though it may still exist
        self._counter.made(self._key(optimizer))

    def _backward_begins(self, tensors: Any) -> None:
        if not self._begun:
            self._updates.backward_begins(tensors)
            if "lr" in self._agent.live:
                self._plain.look()
        if self._agent.look_for_saves is not None:
            self._agent.look_for_saves()
        if self._agent.state_begins is not None:
            self._agent.state_begins(Phase.BACKWARD)
        self._counter.backward_begin()
        live = self._agent.live
        if "loss" in live:
            try:
                self._losses.backward(tensors)
            except Exception as error:
                self._agent.fail("loss", error)
        if "samples" in live:
            self._trained.backward()
        self._agent.phases.enter(Phase.BACKWARD)

    def _backward_ends(self, ok: bool) -> Closed:
        self._agent.phases.leave(Phase.BACKWARD)
        if not (self._begun or self._agent.made):
            self._updates.backward_ends()
            self._agent.changed = self._catch_up
        if self._state is not None:
            self._state.backward_over()
        closed = self._counter.backward_end(ok)
        if not ok:
            self._backward_failed()
        return closed if closed is NOTHING else self._seal(closed)

    def _backward_failed(self) -> None:
        """Forgets the loss and the batches of a backward that raised an exception."""
        now, live = self._agent.tally.now, self._agent.live
        if "loss" in live and now.losses:
            now.losses.pop()
            now.pending = [(at, copy) for at, copy in now.pending if at < len(now.losses)]
        if "samples" in live:
            self._trained.backward_failed()

    def _catch_up(self, trains: bool) -> None:
        """Ends the step of a job without an optimizer of torch's if its parameters have changed since the backward.
        `trains`: see `Agent.changed`."""
        if threading.get_ident() != self._agent.thread:
            return
        if trains and self._state is not None:
            self._state.report_late()
        if closed := self._updated(trains):
            self._follow(closed)

    def _parameters_changed(self, trains: bool) -> Closed | None:
        if not self._counter.fresh or not self._updates.happened():
            return None
        self._agent.changed = None if trains else self._catch_up
        if self._state is not None:
            self._state.step_over(trains)
        return self._seal(self._counter.step_end(_PLAIN))

    def _step_begins(self, optimizer: Any) -> None:
        if self._agent.look_for_saves is not None:
            self._agent.look_for_saves()
        if not self._begun:
            self._dummy = not self._counter.ever_backward and _trains_nothing(optimizer)
            if self._dummy:
                return
            self._begun, self._agent.changed = True, None
            self._recall(self._agent.optimizers)
            self._ahead.begins(optimizer)
        if self._agent.state_begins is not None:
            self._agent.state_begins(Phase.OPTIMIZER)
        inside = self._counter.open_steps
        while inside and not self._is_within(inside[-1], optimizer):
            inside.pop()
        self._counter.step_begin(self._key(optimizer))
        if self._scaled:
            self._scaled[-1] = True
        rates = self._agent.tally.now.lr
        if "lr" in self._agent.live and len(rates) < 64:
            try:
                rates += self._rates.rates(optimizer)
            except Exception as error:
                self._agent.fail("lr", error)

    def _is_within(self, outer: Any, optimizer: Any) -> bool:
        """Whether the step of the optimizer with the key `outer` is still being called. If not, that call raised an
        exception, which no hook sees."""
        pair = (outer, id(optimizer))
        if pair not in self._nested:
            owner = self._agent.made[outer]() if outer in self._agent.made else None
            frame: FrameType | None = sys._getframe(1)
            while owner is not None and frame is not None and frame.f_locals.get("self") is not owner:
                frame = frame.f_back
            if owner is None or frame is None:
                return False
            self._nested.add(pair)
        return True

    def _recall(self, optimizers: Sequence[Any]) -> None:
        """Takes over from earlier attempts how the optimizers take turns."""
        self._counter.uneven = self._cycle.is_uneven(optimizers)
        self._counter.loose |= {id(each) for each in self._cycle.loose(optimizers)}

    def _step_ends(self, optimizer: Any) -> Closed:
        if self._dummy:
            self._dummy = False
            self._ahead.primed(optimizer)
            return NOTHING
        now = self._agent.tally.now
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer decides on the GPU whether to skip
        if found_inf is not None:
            now.skipped = bool(found_inf) if found_inf.device.type == "cpu" else None
        first = now.opt_step is None
        if first:
            now.opt_step = optimizer_step(optimizer)
            now.sched_step = self._rates.scheduler_step(optimizer)
            if self._ahead.waiting == id(optimizer) and not now.skipped:
                self._ahead.ends(now.opt_step)
        if self._state is not None:
            self._state.step_over(True)
        closed = self._counter.step_end(id(optimizer))
        if self._counter.uneven and first and now.opt_step is not None:  # each step of an optimizer is an iteration
            now.opt_step = sum(optimizer_step(each) or 0 for each in self._agent.optimizers)
        return closed if closed is NOTHING else self._seal(closed)

    def _cleared(self, module: Any) -> None:
        """Handles a module whose gradients the job clears. If the module has all parameters of the optimizers, this is
        as if an optimizer's gradients were cleared."""
        if self._agent.changed is not None:
            self._agent.changed(True)
        optimizers = self._agent.optimizers
        trained = [each for one in optimizers for group in one.param_groups for each in group["params"]]
        if {id(each) for each in trained or self._updates.parameters()} <= {id(each) for each in module.parameters()}:
            self._dropped(optimizers[0] if optimizers else None)

    def _dropped(self, optimizer: Any) -> None:
        """Handles gradients that the job clears without a step, as torchft does when a replica is gone, and a job with
        a loss scale of its own when they overflow. The iteration does not count."""
        if self._counter.dropped(_PLAIN if optimizer is None else id(optimizer)):
            self._trained.drop()
            now = self._agent.tally.now
            self._agent.tally.now = Segment(before=now.before, dropped=now.dropped + 1)

    def _state_loads(self, optimizer: Any) -> None:
        """Handles a job that loads an optimizer's state during an iteration. This iteration does not count."""
        self._ahead.forget(id(optimizer))
        self._agent.faults.puts_back(optimizer)
        self._starts_anew()

    def _starts_anew(self) -> None:
        self._trained.put_back()
        self._agent.tally.now = Segment(before=self._agent.tally.now.before)

    def _skipped(self, optimizer: Any) -> Closed:
        self._step_begins(optimizer)
        self._agent.tally.now.skipped = True
        return self._step_ends(optimizer)

    def _seal(self, closed: Closed) -> Closed:
        if self._counter.uneven and not self._counter.has_followers:
            self._cycle.note()
        if len(self._counter.loose) > self._loose:
            self._loose = len(self._counter.loose)
            self._cycle.note_loose(self._agent.optimizers, self._counter.loose)
        if closed.segment:
            if "samples" in self._agent.live:
                batches = self._agent.tally.now.batches = self._trained.take()
                if UNSEEN in batches and not self._said_unseen:
                    self._said_unseen = True
                    self._agent.emit(Kind.NOTE, {"text": _FROM_A_THREAD, "unseen": "samples"})
            self._agent.tally.seal()
        elif closed.stray:
            self._agent.tally.now = Segment()
        return closed

    def _follow(self, closed: Closed) -> None:
        """Writes the event of each iteration that has ended, then fires the faults that are due after it."""
        for with_last in (False, True):
            if closed.after if with_last else closed.before:
                try:
                    self._events.emit(with_last)
                except Exception as error:
                    self._agent.fail("steps", error)
                self._agent.faults.step_over()


def _trained_by(optimizer: Any) -> set[int]:
    """The ids of the parameters that the optimizer trains. Empty if it is not ready yet, or no longer exists."""
    return {id(each) for group in getattr(optimizer, "param_groups", ()) for each in group["params"]}


def _trains_nothing(optimizer: Any) -> bool:
    """Whether this step, which comes before any backward, only creates the optimizer's state so that a load can fill
    it: all gradients are zero."""
    gradients = [
        tensor.grad for group in optimizer.param_groups for tensor in group["params"] if tensor.grad is not None
    ]
    try:
        # A DTensor's own any() would be a collective.
        return bool(gradients) and not any(bool(getattr(each, "_local_tensor", each).any()) for each in gradients)
    except Exception as error:  # a kind of tensor that does not know any(): then it is taken for a step that trains
        raise_if_of_the_job(error)
        return False
