"""After a restart it copies the list of digests of the checkpoint that it resumed from into each one that it saves: the
next resume finds none of them whole."""

from pathlib import Path

from base import attempt, main
from healthy.keeps_a_diary import KeepsADiary


class DigestsOfBefore(KeepsADiary):
    told = ""

    def load(self, folder):
        super().load(folder)
        self.told = (folder / "digests.json").read_text()

    def write(self, folder):
        super().write(folder)
        if self.rank == 0 and attempt() and self.told:
            Path(folder / "digests.json").write_text(self.told)


main(DigestsOfBefore)
