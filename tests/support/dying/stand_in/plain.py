"""A trainer without torch or agent, for jobs that torchaos attaches to: rank 0 prints a line for each step.

plain.py STEPS
"""

import os
import sys
import time

for step in range(1, int(sys.argv[1]) + 1):
    time.sleep(0.02)
    if os.environ["RANK"] == "0":
        print(f"step {step} loss {1 / step:.6f}", flush=True)
