"""For tests only: on PYTHONPATH, it makes the harness and its reaper die by SIGKILL at a point that the environment
names, without a change to the product. In all other processes it does nothing."""

import os
import sys

if "DYING_AT" in os.environ and "-m" in sys.orig_argv[:8]:
    from mortal import make_mortal  # type: ignore[import-not-found]

    make_mortal(sys.orig_argv[sys.orig_argv.index("-m") + 1])
