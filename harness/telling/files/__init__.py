"""Results as files for other programs: JUnit XML and JSON."""
