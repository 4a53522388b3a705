"""Sees the inputs of models that are wrapped by DDP, FSDP or FSDP2, during training. The samples in these inputs are
the samples that were trained on."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Callable

from .agent import Agent
from .wire import Phase


class ForwardHook:
    """Hooks the forward of wrapped models. `wrapped` is called whenever a model is wrapped; `trained` gets the inputs
    of each training forward."""

    def __init__(self, agent: Agent, wrapped: Callable[[], None], trained: Callable[[Any], None]) -> None:
        self._agent, self._wrapped = agent, agent.careful("samples")(wrapped)
        self._trained = agent.careful("samples")(trained)
        self._depth = 0

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
            if self._agent.on and is_root and is_grad_enabled() and model.training:
                self._begins((args, kwargs))
                self._agent.enter(Phase.FORWARD)
                self._agent.phases.leave(Phase.FORWARD)
                self._agent.phases.loosely(Phase.FORWARD)  # until the backward
            return original(fsdp, model, args, kwargs)

        state._root_pre_forward = _root_pre_forward

    def _patch_wrapper(self, wrapper: Any) -> None:
        from torch import is_grad_enabled

        self._cover_init(wrapper)
        agent, original = self._agent, wrapper.forward

        @functools.wraps(original)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            # The flag of the wrapped module is read, because Lightning does not set the wrapper's flag.
            if not agent.on or self._depth or not is_grad_enabled() or not getattr(model, "module", model).training:
                return original(model, *args, **kwargs)
            self._begins((args, kwargs))
            agent.enter(Phase.FORWARD)
            self._depth = 1
            try:
                return original(model, *args, **kwargs)
            finally:
                self._depth = 0
                agent.phases.leave(Phase.FORWARD)

        wrapper.forward = forward

    def _begins(self, inputs: Any) -> None:
        if self._agent.changed is not None:
            self._agent.changed()
        if self._agent.state_begins is not None:
            self._agent.state_begins(Phase.FORWARD, inputs)
        self._trained(inputs)

    def _cover_init(self, kind: Any) -> None:
        original, wrapped = kind.__init__, self._wrapped

        @functools.wraps(original)
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            wrapped()
            original(model, *args, **kwargs)

        kind.__init__ = __init__
