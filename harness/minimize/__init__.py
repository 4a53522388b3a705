"""Finds what a failure needs: the smallest set of faults (shrink), or the releases of packages with which it begins
(bisect). Each try is a whole run by the command line, in a process of its own."""
