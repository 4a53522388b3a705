"""Sees the forwards of models in training, with their inputs: of wrapped models (DDP, FSDP, FSDP2), and, in a job that
wraps none and has no data loader, of every module that the loop itself calls (`patch_modules`).

No module gets a hook of torch's: such hooks are pickled and copied with it, and a global one makes each call of each
submodule slower. `Module.__call__` is wrapped instead. In a call inside another one, the wrapper looks at one attribute
and calls the original."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...protocol.wire import Phase
from ..agent import Agent
from .batch_ring import TrainedBatches

_KEPT = "unpatched_nn_module_call"  # the name under which torch.compile keeps Module.__call__
_TRACED = ("FakeTensor", "FunctionalTensor")
_KEPT_IN = ("torch._dynamo.utils", "torch._dynamo.variables.nn_module")


class ForwardHook:
    """Hooks the forward of models, and tells `batches` of them. `wrapped` is called whenever a model is wrapped."""

    def __init__(self, agent: Agent, batches: TrainedBatches, wrapped: Callable[[], None]) -> None:
        careful = agent.careful("samples")
        self._agent, self._batches, self._wrapped = agent, batches, careful(wrapped)
        self._trained, self._failed = careful(batches.forward), careful(batches.forward_failed)
        self._inside = False  # the forward of a model is running
        self._uncover: Callable[[], None] | None = None  # undoes patch_modules

    def patch_ddp(self, module: ModuleType) -> None:
        self._patch_wrapper(module.DistributedDataParallel)

    def patch_fsdp(self, module: ModuleType) -> None:
        self._patch_wrapper(module.FullyShardedDataParallel)

    def patch_fsdp2(self, module: ModuleType) -> None:
        """Patches FSDP2, which wraps no module: it adds a hook before the module's forward."""
        from torch import is_grad_enabled

        state = module.FSDPState
        self._cover_init(state)
        original = state._root_pre_forward

        @functools.wraps(original)
        def _root_pre_forward(fsdp: Any, model: Any, args: Any, kwargs: Any) -> Any:
            context = getattr(fsdp, "_state_ctx", None)
            is_root = getattr(context, "iter_forward_root", None) is None
            if self._agent.on and is_root and not self._inside and is_grad_enabled() and model.training:
                self._begins((args, kwargs))
                try:
                    self._agent.enter(Phase.FORWARD)
                except BaseException:
                    self._failed()
                    raise
                self._agent.phases.leave(Phase.FORWARD)
                self._agent.phases.loosely(Phase.FORWARD)  # until the backward
            return original(fsdp, model, args, kwargs)

        state._root_pre_forward = _root_pre_forward

    def patch_pipelines(self, module: ModuleType) -> None:
        """Patches the stages of torch's pipelines: a stage finds out its shapes by a forward, which must not count
        because it gets no data."""
        stage = module.PipelineStage
        for name in ("_forward_metadata_inference", "_shape_inference"):  # newer, and older, versions of torch
            if name in vars(stage):
                setattr(stage, name, self._unseen(getattr(stage, name)))

    def _unseen(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unseen(*args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._inside, True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = before

        return unseen

    def _patch_wrapper(self, wrapper: Any) -> None:
        from torch import is_grad_enabled

        self._cover_init(wrapper)
        agent, original = self._agent, wrapper.forward

        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if not agent.on or self._inside:
                return original(model, *args, **kwargs)
            # The flag of the wrapped module is read, because Lightning does not set the wrapper's flag.
            if not is_grad_enabled() or not getattr(model, "module", model).training:
                self._batches.evaluates()
                return original(model, *args, **kwargs)
            return self._train(original, model, args, kwargs)

        wrapper.forward = forward

    def patch_modules(self, torch: ModuleType) -> None:
        """Patches torch.nn.Module, until a model is wrapped or a loader turns out to feed the training."""
        kind, original = torch.nn.Module, torch.nn.Module.__call__
        agent, thread, trains = self._agent, threading.get_ident, self._agent.careful("samples")(_trains)

        @functools.wraps(original)  # its name makes torch.compile begin with the frame inside
        def __call__(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not agent.on or self._uncover is None or thread() != agent.thread:
                return original(model, *args, **kwargs)
            if trains(torch, model, (*args, *kwargs.values())):
                return self._train(original, model, args, kwargs)
            if not (torch.is_grad_enabled() and model.training):
                self._batches.evaluates()
            self._inside = True
            try:
                return original(model, *args, **kwargs)
            finally:
                self._inside = False

        def uncover() -> None:
            for place, name in ((kind, "__call__"), *((sys.modules.get(each), _KEPT) for each in _KEPT_IN)):
                if getattr(place, name, None) is __call__:
                    setattr(place, name, original)

        kind.__call__, self._uncover = __call__, uncover

    def leave_modules(self) -> None:
        """Undoes `patch_modules`. The forwards that it saw so far count as no training."""
        if self._uncover is not None:
            self._uncover()
            self._uncover, self._agent.sees_forwards = None, False
            self._batches.forget_forwards()

    def _train(self, original: Callable[..., Any], model: Any, args: Any, kwargs: Any) -> Any:
        self._begins((args, kwargs))
        try:
            self._agent.enter(Phase.FORWARD)
            self._inside = True
            return original(model, *args, **kwargs)
        except BaseException:
            self._failed()
            raise
        finally:
            self._inside = False
            self._agent.phases.leave(Phase.FORWARD)

    def _begins(self, inputs: Any) -> None:
        self._agent.sees_forwards = True
        if self._agent.changed is not None:
            self._agent.changed(True)
        if self._agent.state_begins is not None:
            self._agent.state_begins(Phase.FORWARD, inputs)
        self._trained(inputs)

    def _cover_init(self, kind: Any) -> None:
        original, wrapped = kind.__init__, self._wrapped

        @functools.wraps(original)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            wrapped()
            self.leave_modules()
            original(model, *args, **kwargs)

        kind.__init__ = __init__


def _trains(torch: Any, model: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether this call begins a forward of the loop in training: the model has something to learn, and no input comes
    from the forward of another model. False for calls that activation checkpointing repeats in the backward, and for
    calls by which torch traces or transforms, because these get no data."""
    if not (torch.is_grad_enabled() and model.training) or torch._C._current_graph_task_id() != -1:
        return False
    level: Callable[[], Any] = getattr(torch._C._functorch, "maybe_current_level", _no_level)
    if torch._C._get_tracing_state() is not None or level() is not None:
        return False
    if any(getattr(each, "grad_fn", None) is not None or type(each).__name__ in _TRACED for each in inputs):
        return False
    return any(each.requires_grad for each in model.parameters())


def _no_level() -> None:
    return None
