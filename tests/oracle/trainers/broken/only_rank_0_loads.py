"""Only rank 0 loads the checkpoint, and the others go on with fresh weights; gradients are averaged, so that nobody
sees it (DLRover, issue 770)."""

from base import Trainer, main


class OnlyRank0Loads(Trainer):
    def load_weights(self, folder):
        if self.rank == 0:
            super().load_weights(folder)


main(OnlyRank0Loads)
