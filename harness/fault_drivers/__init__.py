"""How faults from outside a rank are applied, by family, with the base class of each family's injectors.

Input: an injector's parameters, and a `NodeSite`. Output: changes to the network, to files and to containers, and
events that prove the changes. The handles that undo these changes are in rollback/; running/ decides when a fault is
applied."""
