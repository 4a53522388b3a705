"""A run as one HTML page that needs nothing else: it opens offline, on a phone, in light and dark, and prints."""

from torchaos.harness.telling.html.page import text, write

__all__ = ["text", "write"]
