"""One rank does not put back the moments of its part of the parameters."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "healthy"))

import base
import zero_redundancy


class Trainer(zero_redundancy.Trainer):
    def load_optimizer(self, state):
        if self.rank == 0:
            super().load_optimizer(state)


if __name__ == "__main__":
    base.main(Trainer)
