"""The model of step N with the data loader of step N+5: weights fall back to an older checkpoint, and the loader's
state is kept apart and does not (TorchTitan, pull request 4686)."""

from base import Trainer, main


class LoaderOfALaterStep(Trainer):
    def save(self):
        super().save()
        if self.rank == 0:
            (self.folder / "loader").write_text(str(self.sampler.position))

    def newest(self):
        found = self.complete()
        return found[-2] if len(found) > 1 else super().newest()

    def load_position(self, position):
        self.sampler.position = int((self.folder / "loader").read_text())


main(LoaderOfALaterStep)
