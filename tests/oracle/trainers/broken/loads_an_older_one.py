"""Goes back to the checkpoint before the newest complete one (DeepSpeed, issue 8499: another tag than the one that was
asked for is loaded without a word)."""

from base import Trainer, main


class LoadsAnOlderOne(Trainer):
    def newest(self):
        found = self.complete()
        return found[-2] if len(found) > 1 else None


main(LoadsAnOlderOne)
