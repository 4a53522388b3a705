"""Takes the learning rate from the command line after a resume, and the schedule is no longer heeded (TorchTitan, pull
request 4598: a replica that rejoins has the wrong rate)."""

from base import Trainer, main


class RateFromConfig(Trainer):
    resumed = False

    def load_schedule(self, state):
        super().load_schedule(state)
        self.resumed = True

    def update(self):
        if self.resumed:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"]
        super().update()


main(RateFromConfig)
