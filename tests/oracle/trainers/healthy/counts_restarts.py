"""Notes in its checkpoints how often it was restarted, and from where it resumed, as timm and Swin do by saving their
arguments."""

from base import Trainer, attempt, main


class CountsRestarts(Trainer):
    resumed = ""

    def load(self, folder):
        super().load(folder)
        self.resumed = str(folder)

    def shared_state(self):
        meta = {"restarts": attempt(), "resumed": bool(self.resumed)}
        return {**super().shared_state(), "meta": meta, "args": {"resume": self.resumed, "lives": 9 - attempt()}}


main(CountsRestarts)
