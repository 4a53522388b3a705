"""Begins with the first sample of the data again, and with the step that it had reached: NVRx's example
train_ddp_sections_api.py."""

from base import Trainer, main


class RestartsSampler(Trainer):
    def load_position(self, position):
        pass


main(RestartsSampler)
