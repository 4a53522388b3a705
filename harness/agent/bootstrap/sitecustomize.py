"""Python imports this file when it starts, because the launcher puts this folder first on PYTHONPATH.

It loads the agent in a rank of a torchaos job, and in a torchrun, to count the attempts. Then it runs the user's own
sitecustomize, which this file hides."""

import os
import sys


def _load_agent() -> None:
    """Loads the folder above as the package `_torchaos_agent`. An error is printed; the job goes on."""
    in_rank = {"RANK", "LOCAL_RANK"} <= os.environ.keys()
    before_ranks = "RANK" not in os.environ  # it may be a torchrun
    if "_torchaos_agent" in sys.modules or "TORCHAOS_PLAN" not in os.environ or not (in_rank or before_ranks):
        return
    try:
        import importlib.util

        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        spec = importlib.util.spec_from_file_location(
            "_torchaos_agent", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        if spec is not None and spec.loader is not None:
            package = importlib.util.module_from_spec(spec)
            sys.modules["_torchaos_agent"] = package
            spec.loader.exec_module(package)
            package.start()
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
