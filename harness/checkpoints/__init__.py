"""Reads checkpoints of every format, without torch and without running any code in them, and says whether they are
whole.

A folder or an address in an object store comes in. Layouts, digests and problems go out, which name tensor, element and
bit. It knows nothing of faults and runs.
"""
