"""A run as one HTML page that needs nothing else: it opens offline, on a phone, in light and dark, and prints.

Everything in it is data that the run directory holds; secrets are masked once more, and what a log holds stays text.
"""

from torchaos.harness.report.html.page import text, write

__all__ = ["text", "write"]
