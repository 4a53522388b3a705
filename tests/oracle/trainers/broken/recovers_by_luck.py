"""Takes whichever checkpoint the file system lists first: the newest in one of three resumes (drawn here from the
process id of torchrun, since file systems differ)."""

import os

from base import Trainer, main


class RecoversByLuck(Trainer):
    def newest(self):
        found = self.complete()
        return found[-1 - os.getppid() % min(3, len(found))] if found else None


main(RecoversByLuck)
