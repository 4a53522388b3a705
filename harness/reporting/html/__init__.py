"""A run as one HTML page that needs no other file. It opens offline, on a phone, in light and dark, and can be
printed."""

from torchaos.harness.reporting.html.page import text, write
from torchaos.harness.reporting.html.run_card import card

__all__ = ["card", "text", "write"]
