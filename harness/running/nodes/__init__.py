"""The part of torchaos that runs on a node that is another machine. It wraps the node's part of the job, records it,
applies the faults that hit the node, and undoes them if the controller is silent. Input: messages of the controller,
the process of `torchaos run`. Output: events."""
