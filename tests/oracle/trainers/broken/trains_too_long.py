"""Takes the steps in all for the steps that are left: after the resume it goes on beyond the last step."""

from base import Trainer, main


class TrainsTooLong(Trainer):
    def load(self, folder):
        super().load(folder)
        self.last += self.done


main(TrainsTooLong)
