"""Saves and loads of checkpoints: the hooks that see them, what becomes of the files, and the manifests of saves."""
