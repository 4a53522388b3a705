"""Counts the steps that brought nothing, to stop early one day, and counts from zero again after a restart. Nothing but
the checkpoint shows it here."""

from base import Trainer, attempt, main


class ForgetsBadSteps(Trainer):
    best, bad = float("inf"), 0

    def step(self, batches):
        loss = super().step(batches)
        self.bad += loss >= self.best
        self.best = min(loss, self.best)
        return loss

    def own_state(self):
        return {**super().own_state(), "stopping": {"bad": self.bad, "best": self.best}}

    def load_rng(self, state):
        super().load_rng(state)
        self.best = state["stopping"]["best"]
        self.bad = 0 if attempt() else state["stopping"]["bad"]


main(ForgetsBadSteps)
