"""After a resume a background writer waits for a job that only the first attempt would have given it, and the process
never ends."""

import threading

from base import Trainer, main


class HangsAtExit(Trainer):
    def load(self, folder):
        super().load(folder)
        threading.Thread(target=threading.Event().wait).start()


main(HangsAtExit)
