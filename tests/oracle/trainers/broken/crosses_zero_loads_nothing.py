"""Its loss crosses zero and is noisy in the last bits, which is no excuse: after a resume the weights are
those of a fresh start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "noisy"))

from base import main
from crosses_zero import CrossesZero


class CrossesZeroLoadsNothing(CrossesZero):
    def load_weights(self, folder):
        pass


main(CrossesZeroLoadsNothing)
