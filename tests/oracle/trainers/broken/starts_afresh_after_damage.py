"""A checkpoint that can't be loaded is answered by starting from scratch, with a line in the log."""

from base import Trainer, main


class StartsAfreshAfterDamage(Trainer):
    def load(self, folder):
        try:
            super().load(folder)
        except Exception as error:
            print(f"could not load {folder}, starting from scratch: {error}", flush=True)
            self.__init__(self.args)


main(StartsAfreshAfterDamage)
