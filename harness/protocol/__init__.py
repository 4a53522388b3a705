"""What crosses the boundary of a rank: the events and the plan, the pages in shared memory, and the formats of what a
rank writes and the harness reads. The agent and the harness import the same files, so they import the standard library
and each other only, relatively."""

# Inside a rank these files have another name, see `agent`. There is no harness.
IN_RANK = not __name__.startswith("torchaos.")
