"""After a resume the loop calls the inner model and no longer the one that DDP wraps: each rank trains for itself."""

from base import PARTS, Trainer, main


class ReplicasDiverge(Trainer):
    resumed = False

    def load_weights(self, folder):
        super().load_weights(folder)
        self.resumed = True

    def backward(self, batch):
        if not self.resumed:
            return super().backward(batch)
        loss = self.loss(self.model, batch) / PARTS
        self.scaler.scale(loss).backward()
        return loss.item()


main(ReplicasDiverge)
