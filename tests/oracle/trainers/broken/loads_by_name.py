"""Takes the newest checkpoint to be the last in the order of names: step-5 comes after step-15."""

from base import Trainer, main


class LoadsByName(Trainer):
    def newest(self):
        return max(self.folder.glob("step-*[0-9]"), key=lambda path: path.name, default=None)


main(LoadsByName)
