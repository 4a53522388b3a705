"""Stops early, after so many evaluations without a better one. The best metric is put back after a resume and the
count of evaluations is not: training goes on beyond the step in which it should have stopped."""

from base import Trainer, main

PATIENCE = 8  # evaluations, one after every other step
METRICS = {2: 1.0}  # that of step 2 is the best one


class ForgetsPatience(Trainer):
    best, worse = float("inf"), 0

    def after_step(self):
        if self.done % 2 == 0:
            metric = METRICS.get(self.done, 2.0)
            self.worse = 0 if metric < self.best else self.worse + 1
            self.best = min(self.best, metric)
            if self.worse == PATIENCE:
                self.last = self.done
        super().after_step()

    def shared_state(self):
        return {**super().shared_state(), "best": self.best}

    def load(self, folder):
        super().load(folder)
        self.best = METRICS[2]


main(ForgetsPatience)
