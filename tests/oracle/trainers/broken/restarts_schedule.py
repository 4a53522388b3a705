"""The learning rate's schedule starts again with its warm-up."""

from base import Trainer, main


class RestartsSchedule(Trainer):
    def load_schedule(self, state):
        pass

    def load_optimizer(self, state):
        rates = [group["lr"] for group in self.optimizer.param_groups]
        super().load_optimizer(state)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


main(RestartsSchedule)
