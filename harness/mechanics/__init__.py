"""How faults from outside a rank are applied, by family, with the base class of each family's injectors.

An injector's parameters and a `NodeSite` come in. Changes to the network, to files and to containers go out, and events
that prove them. Handles for undoing these changes are in undo/; running/ decides when a fault is applied.
"""
