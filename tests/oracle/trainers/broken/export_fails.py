"""The export after the last step fails in an attempt that was resumed: rank 0 ends with an error, and behind a pipe the
command ends with exit code 0 all the same."""

from base import Trainer, attempt, main


class ExportFails(Trainer):
    def finish(self):
        super().finish()
        if attempt() and self.rank == 0:
            raise RuntimeError("the model could not be exported")


main(ExportFails)
