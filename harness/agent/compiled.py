"""Makes torch.compile skip the agent's files.

Otherwise the hooks of an optimizer would be inlined into a compiled step. Now the graph breaks at the hooks, and they
run uncompiled. Torch breaks the graph at every optimizer's step anyway, so no job loses fullgraph=True by that.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType


def leave_alone(rules: ModuleType) -> None:
    """Makes torch.compile skip the agent's files. `rules`: the module torch._dynamo.trace_rules."""
    rules.SKIP_DIRS.append(str(Path(__file__).parent))
    rules._recompile_re()
