"""A run as one HTML page without any other file: it opens offline, on a phone, in light and dark, and can be
printed."""

from torchaos.harness.telling.html.page import text, write

__all__ = ["text", "write"]
