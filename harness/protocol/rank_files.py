"""What a rank leaves beside its events, and what the harness needs to know of its process. Standard library only."""

from __future__ import annotations

import signal

# At this signal, a rank writes its Python stacks to `RUN_DIR/agent/stacks/rank<R>-a<attempt>-p<pid>.txt`. Real-time
# signals have no use of their own.
STACKS_SIGNAL = signal.SIGRTMAX - 7
STACKS = "stacks"
THREAD = "torchaos"  # name of the agent's threads in the kernel; storage faults spare them
# The letter before each path in the list of files that a rank read. FAILED: nothing was recorded after this.
READ, LISTED, WRITTEN, FAILED = "r", "l", "w", "!"
