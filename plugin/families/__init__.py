"""The base classes of the families of faults, and the names that injectors of one family share."""
