"""Makes torch.compile skip the agent's files. Otherwise torch.compile would inline the agent's optimizer hooks into a
compiled step. If it skips them, it breaks the graph at the hooks and runs them uncompiled. Torch breaks the graph at
every optimizer step anyway, so a job that sets fullgraph=True works as before."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType


def leave_alone(rules: ModuleType) -> None:
    """Makes torch.compile skip the agent's files. `rules`: the module torch._dynamo.trace_rules."""
    rules.SKIP_DIRS.append(str(Path(__file__).parent))
    rules._recompile_re()
