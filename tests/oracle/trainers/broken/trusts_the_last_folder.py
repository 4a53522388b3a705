"""Writes the folder of a checkpoint in place, and takes a job for done as soon as there is a folder of its last step: a
death in the very last save leaves a torn checkpoint, and exit code 0."""

from base import Trainer, main


class TrustsTheLastFolder(Trainer):
    def save(self):
        folder = self.folder / f"step-{self.done}"
        folder.mkdir(exist_ok=True)
        self.write(folder)

    def resume(self):
        if (self.folder / f"step-{self.last}").exists():
            self.done = self.last
        else:
            super().resume()


main(TrustsTheLastFolder)
