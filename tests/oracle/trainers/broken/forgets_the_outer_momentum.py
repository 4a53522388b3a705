"""DiLoCo: each rank trains by itself for four steps, then an outer optimizer takes the mean of what they moved by. Its
momentum is saved and not put back: the first meeting after a resume begins with none."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "healthy"))

import base
import diloco


class ForgetsTheOuterMomentum(diloco.DiLoCo):
    def load_outer(self, state):
        pass


if __name__ == "__main__":
    base.main(ForgetsTheOuterMomentum)
