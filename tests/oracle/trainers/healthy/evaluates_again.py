"""Evaluates after each save, and after a resume where the result of the checkpoint is missing."""

from base import main
from evaluation import Evaluating


class EvaluatesAgain(Evaluating):
    def resume(self):
        super().resume()
        if self.done and not self.result().exists():
            self.evaluate()


main(EvaluatesAgain)
