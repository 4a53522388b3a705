"""Defines the keys and values of a scenario, and reports mistakes. Input: a YAML file. Output: a typed `Scenario`, or
all mistakes at once, each with its line and advice. Nothing is drawn at random or started, and the machine is not
checked."""
