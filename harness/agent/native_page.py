"""A page that the agent shares with one of torchaos's C libraries in the same process. Standard library only."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import ClassVar, TypeVar

Self = TypeVar("Self", bound="NativePage")


class NativePage:
    """A file of `size` bytes, `p<pid>.<suffix>`, in the folder that the environment variable `env` names. It holds
    signed 64-bit words in the byte order of the machine. The agent or the library makes the file, whichever comes
    first, with the same contents. The library writes `magic` into word 0 when it is loaded."""

    env: ClassVar[str]
    suffix: ClassVar[str]
    size: ClassVar[int]
    magic: ClassVar[int]

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_size == 0:
                os.ftruncate(fd, self.size)
            self._map = mmap.mmap(fd, self.size)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")

    @classmethod
    def of_this_process(cls: type[Self]) -> Self:
        """The page of this process. Raises KeyError if the environment variable is not set, because no fault of the
        plan uses such a page."""
        return cls(Path(os.environ[cls.env]) / f"p{os.getpid()}.{cls.suffix}")

    @property
    def loaded(self) -> bool:
        """Whether the library is loaded in this process. NCCL loads it with its first call or communicator."""
        return bool(self._words[0] == self.magic)
