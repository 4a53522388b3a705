"""How faults from outside are done, by family, each with the base class of its injectors.

An injector's parameters and a `NodeSite` come in; changes to the network, to files, to containers go out, and events
that prove them. How a change is taken back is written in undo/; when it is done is decided in running/."""
