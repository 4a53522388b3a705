"""Defines the keys and values of a scenario, and reports mistakes.

Input: a YAML file. Output: a typed `Scenario`, or all mistakes at once, each with its line and advice. Nothing is drawn
at random, checked on the machine, or started here."""

from torchaos.harness.scenario.loader import load

__all__ = ["load"]
