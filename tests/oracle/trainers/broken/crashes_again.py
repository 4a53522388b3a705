"""What it restores makes it crash in the same step after every restart, until the restarts are used up (Megatron-LM,
issue 5281: 44 cycles with the same NaN)."""

from base import Trainer, main


class CrashesAgain(Trainer):
    poisoned = False

    def load(self, folder):
        super().load(folder)
        self.poisoned = True

    def step(self, batches):
        if self.poisoned and self.done == 11:
            raise ValueError("loss is NaN")
        return super().step(batches)


main(CrashesAgain)
