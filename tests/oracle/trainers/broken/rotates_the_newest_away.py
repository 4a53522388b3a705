"""Starts from step 1 where the newest checkpoint can't be loaded, and keeps the three checkpoints that were written
last: its new saves remove the later steps of the attempt before, which a person could have repaired."""

from base import Trainer, main


class RotatesTheNewestAway(Trainer):
    def load(self, folder):
        try:
            super().load(folder)
        except Exception as error:
            print(f"could not load {folder}, starting from scratch: {error}", flush=True)
            self.__init__(self.args)

    def complete(self):
        return sorted(super().complete(), key=lambda path: path.stat().st_mtime)


main(RotatesTheNewestAway)
