"""The background writer died with the first attempt and is not started again: after a resume nothing is saved any
more."""

from base import Trainer, attempt, main


class StopsSaving(Trainer):
    def save(self):
        if attempt() == 0:
            super().save()


main(StopsSaving)
