"""Its sums come out differently each time in the last bits. A resume puts back the step counters of Adam and none of
its moments, as after a load that matched no name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "noisy"))

from atomics import Atomics
from base import main


class NoiseForgetsMoments(Atomics):
    def load_optimizer(self, state):
        super().load_optimizer(state)
        for moments in self.optimizer.state.values():
            moments["exp_avg"].zero_()
            moments["exp_avg_sq"].zero_()


main(NoiseForgetsMoments)
