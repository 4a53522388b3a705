"""Reads checkpoints of every format without torch and without running anything in them, and says whether they are
whole.

A folder or an address of an object store comes in; layouts, digests and problems go out, to the tensor, element and
bit. It knows nothing of faults and runs."""
