"""Resumes at once, with what is left of the data that were read already, and builds the index of the rest in the loop:
two steps after it has caught up, training stands still."""

import time

from base import Trainer, main

LEFT, INDEX_S = 4, 15.0  # steps, and how long the index takes


class HaltsAfterTheRecovery(Trainer):
    halts_after = None

    def load(self, folder):
        super().load(folder)
        self.halts_after = self.done + LEFT

    def after_step(self):
        super().after_step()
        if self.done == self.halts_after:
            time.sleep(INDEX_S)


main(HaltsAfterTheRecovery)
