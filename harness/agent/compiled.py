"""torch.compile: it is to pass over the agent's files.

Hooks of an optimizer would be inlined into a compiled step otherwise. So the graph breaks at them and they run as
they are; torch breaks the graph of every optimizer's step by itself, so nobody's fullgraph=True is lost by it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType


def leave_alone(rules: ModuleType) -> None:
    """torch._dynamo.trace_rules."""
    rules.SKIP_DIRS.append(str(Path(__file__).parent))
    rules._recompile_re()
