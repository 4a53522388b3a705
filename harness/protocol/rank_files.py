"""Constants about the files that a rank writes beside its events, and about its process. Standard library only."""

from __future__ import annotations

import signal

# When a rank gets this signal, it writes its Python stacks to `RUN_DIR/agent/stacks/rank<R>-a<attempt>-p<pid>.txt`.
# Real-time signals have no predefined meaning.
STACKS_SIGNAL = signal.SIGRTMAX - 7
STACKS = "stacks"
THREAD = "torchaos"  # name of the agent's threads in the kernel; storage faults spare them
# The letter before each path in the list of files that a rank used. FAILED: later files were not recorded.
READ, LISTED, WRITTEN, FAILED = "r", "l", "w", "!"
