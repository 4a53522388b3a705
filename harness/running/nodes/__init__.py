"""The part of torchaos that runs on a node that is another machine. It starts the node's part of the job, records it,
applies the faults that hit the node, and undoes them if the controller (the process of `torchaos run`) sends no
messages any more. Input: messages of the controller. Output: events."""
