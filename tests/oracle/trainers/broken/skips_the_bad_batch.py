"""Takes the batch in which it died for the culprit and leaves it out after the restart, whatever had killed it."""

from base import Trainer, main


class SkipsTheBadBatch(Trainer):
    crashed_in = None

    def step(self, batches):
        if self.done == self.crashed_in:
            for _part in range(2):
                next(batches)
        (self.folder / f"in-step-{self.rank}").write_text(str(self.done))
        return super().step(batches)

    def load(self, folder):
        super().load(folder)
        self.crashed_in = int((self.folder / f"in-step-{self.rank}").read_text())


main(SkipsTheBadBatch)
