"""What crosses the boundary of a rank: the agent's plan, the events, the pages in shared memory, and the formats of the
files that a rank writes and the harness reads. The agent and the harness import the same modules. So these import only
the standard library and, relatively, each other."""

# Inside a rank, where no harness is installed, these modules have another name (see `agent`).
IN_RANK = not __name__.startswith("torchaos.")
