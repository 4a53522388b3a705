"""Writes results to files for other programs: JUnit XML and JSON."""
