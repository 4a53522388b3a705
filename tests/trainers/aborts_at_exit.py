"""The plain DDP loop, which aborts once on its way out, as torch does when a process group is not destroyed.

Rank 0 does so in the attempt after the first restart, when all steps are done: torchrun then starts it again.
"""

import atexit
import os

import plain_ddp


def abort():
    os.write(2, b"terminate called without an active exception\n")
    os.abort()


if __name__ == "__main__":
    if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("0", "1"):
        atexit.register(abort)
    plain_ddp.main()
