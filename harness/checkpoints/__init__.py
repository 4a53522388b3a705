"""Reads checkpoints of every format, without torch and without running code from them, and checks whether they are
complete and undamaged.

Input: a folder, or an address in an object store. Output: layouts, digests, and problems that name the tensor, the
element and the bit. Nothing here knows faults or runs."""
