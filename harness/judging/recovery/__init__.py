"""When training went on after a fault, and how long each part of that took. Pure."""
