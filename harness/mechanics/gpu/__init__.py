"""Faults in what a GPU says of its health: the NVML overlay (injectors/native/nvml) and the orders that it is given."""
