"""A run as one HTML page that needs no other file. It opens offline, on a phone, in light and dark, and can be
printed."""

from torchaos.harness.reporting.html.index import card
from torchaos.harness.reporting.html.page import text, write

__all__ = ["card", "text", "write"]
