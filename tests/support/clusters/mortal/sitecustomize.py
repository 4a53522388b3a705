"""For tests only: on PYTHONPATH, it makes one part of a run on a cluster die at a point, see dying/mortal. DYING_WHERE
is the node, and the command of torchaos whose process and reaper may die there: `n2 exec`. Other processes of the run
have the same environment."""

import os
import sys
from pathlib import Path

_HARNESS, _REAPER = "torchaos.harness", "torchaos.harness.rollback.reaper"

if "DYING_AT" in os.environ and "-m" in sys.orig_argv[:8]:
    place = sys.orig_argv.index("-m")
    node, command = os.environ["DYING_WHERE"].split()
    module, first = (*sys.orig_argv[place + 1 : place + 3], "")[:2]
    if os.uname().nodename == node and (module == _REAPER or (module, first) == (_HARNESS, command)):
        sys.path.append(str(Path(__file__).parents[2] / "dying" / "mortal"))
        from mortal import make_mortal  # type: ignore[import-not-found]

        make_mortal(module)
