"""FSDP2, and folders of torch.distributed.checkpoint of which the last in the order of names is taken: step_9 comes
after step_12."""

from sharded import Sharded, main


class SortsFoldersOfShards(Sharded):
    def newest(self):
        whole = [path.parent for path in self.folder.glob("step_*/.metadata")]
        return max(whole, key=lambda path: path.name, default=None)


main(SortsFoldersOfShards)
