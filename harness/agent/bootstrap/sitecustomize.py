"""Python imports this file when it starts, because the launcher puts this folder first on PYTHONPATH.

It starts the agent in a rank of a torchaos job, and in a torchrun process. Then it runs the user's own sitecustomize,
which would otherwise not be found."""

import os
import sys


def _load_agent() -> None:
    """Loads the agent as the package `_torchaos.agent` and starts it. An error is printed, and the job goes on."""
    in_rank = {"RANK", "LOCAL_RANK"} <= os.environ.keys()
    before_ranks = "RANK" not in os.environ  # it may be a torchrun
    if "_torchaos" in sys.modules or "TORCHAOS_PLAN" not in os.environ or not (in_rank or before_ranks):
        return
    try:
        from importlib import import_module
        from types import ModuleType

        package = sys.modules["_torchaos"] = ModuleType("_torchaos")
        package.__path__ = [os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
        import_module("_torchaos.agent").start()
    except Exception as error:
        print(f"torchaos: the agent did not start: {error!r}", file=sys.stderr)


def _hand_over() -> None:
    """Runs the user's sitecustomize, which this file hides, as Python would have done. Its errors are not caught."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.realpath(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_load_agent()
_hand_over()
