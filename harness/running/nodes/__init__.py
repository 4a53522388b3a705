"""What torchaos does on a node that is another machine: it wraps the node's part of the job, records it, applies the
faults that hit the node, and takes them back when nobody asks for them any more."""
