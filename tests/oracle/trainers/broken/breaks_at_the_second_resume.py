"""Corrects its position for the batch that was under way, once for each resume but the first: one resume is right, the
second replays data (Composer, issue 3725: runs diverge after repeated resumes)."""

from base import Trainer, attempt, main


class BreaksAtTheSecondResume(Trainer):
    def load_position(self, position):
        self.sampler.position = position - max(0, attempt() - 1)


main(BreaksAtTheSecondResume)
