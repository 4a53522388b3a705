"""torch.compile and the hooks: it leaves the agent's files alone, and a step inside compiled code is still seen.

This is the one file of the agent that torch.compile may trace: it inlines an optimizer's hooks into the graph. A call
from there into another file of the agent breaks the graph, which is harmless, unless the user asked for a graph without
breaks (fullgraph=True). From then on the hooks vanish from whatever is compiled, and a compiled `optimizer.step` is
called between them.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

Hook = Callable[[Any], None]

whole_graphs = False  # fullgraph=True has been asked for


def hook_steps(module: ModuleType, before: Hook, after: Hook) -> None:
    """torch.optim.optimizer: call `before` and `after` around every optimizer's step."""
    from torch.compiler import is_compiling

    def pre(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not (whole_graphs and is_compiling()):
            before(optimizer)

    def post(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not (whole_graphs and is_compiling()):
            after(optimizer)

    module.register_optimizer_step_pre_hook(pre)
    module.register_optimizer_step_post_hook(post)


def patch_compile(module: ModuleType, before: Hook, after: Hook) -> None:
    """torch."""
    original = module.compile

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        global whole_graphs
        if model is None:
            return lambda function: compile(function, **kwargs)
        result = original(model, **kwargs)
        if not kwargs.get("fullgraph") or isinstance(model, module.nn.Module):
            return result
        whole_graphs = True
        owner = getattr(model, "__self__", None)
        return _around(result, owner, before, after) if isinstance(owner, module.optim.Optimizer) else result

    module.compile = compile  # type: ignore[attr-defined]


def _around(step: Any, optimizer: Any, before: Hook, after: Hook) -> Any:
    @functools.wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        before(optimizer)
        result = step(*args, **kwargs)
        after(optimizer)
        return result

    return call


def leave_alone(rules: ModuleType) -> None:
    """torch._dynamo.trace_rules: pass over the agent's files, all but this one."""
    folder = Path(__file__).parent
    rules.SKIP_DIRS.extend(str(path) for path in folder.glob("*.py") if path != Path(__file__))
    rules._recompile_re()
