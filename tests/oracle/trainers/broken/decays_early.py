"""A schedule by hand: a warm-up, a long level stretch, a decay. Its counter is one ahead after a resume, which shows
only eight steps later, when the decay begins."""

from base import Trainer, main

RATE, DECAYS_FROM = 1e-2, 18


class ByHand:
    def __init__(self, optimizer, last):
        self.optimizer, self.last, self.calls = optimizer, last, 0
        self.step()

    def step(self):
        decay = (self.last - self.calls) / (self.last - DECAYS_FROM)
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * max(0.0, min(1.0, (self.calls + 1) / 6, decay))
        self.calls += 1

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
        self.step()  # to set the rate, and it counts


class DecaysEarly(Trainer):
    def __init__(self, args):
        super().__init__(args)
        self.schedule = ByHand(self.optimizer, args.steps)


main(DecaysEarly)
