"""The base classes of the families of faults, and what their injectors share."""
