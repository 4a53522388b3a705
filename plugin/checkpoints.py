"""Checkpoint formats."""

from torchaos.harness.checkpoints.files import Files
from torchaos.harness.checkpoints.formats.format import Format, note_missing, problem_of
from torchaos.harness.checkpoints.layout import (
    ITEM_SIZES,
    Checkpoint,
    Checksum,
    Extent,
    Problem,
    Shard,
    TensorEntry,
    Trouble,
    Unreadable,
    torn,
)
from torchaos.harness.checkpoints.zip_records import records

__all__ = [
    "Checkpoint", "Checksum", "Extent", "Files", "Format", "ITEM_SIZES", "Problem", "Shard", "TensorEntry",
    "Trouble", "Unreadable", "note_missing", "problem_of", "records", "torn",
]  # fmt: skip
