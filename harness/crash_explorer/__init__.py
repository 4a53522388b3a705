"""Tries every moment at which the whole job can die.

    recorder -> recording -> states -> (each state is resumed) -> outcomes

The recorder writes down what one run without faults does to its checkpoint folder. A model of death says which contents
of the folder a death can leave. States with equal contents are tried once."""
