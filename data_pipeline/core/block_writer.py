"""Base class of Arrow writers that buffer rows in memory until their block ends."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from llmsys.token_shards import ArrowFileWriter


class BlockWriter(ABC):
    """A file that is published with its buffered rows when its block ends. A failed block publishes nothing."""

    def __init__(self, writer: ArrowFileWriter) -> None:
        self._writer = writer

    @abstractmethod
    def _flush(self) -> None:
        """Write the buffered rows."""

    def __enter__(self) -> Self:
        """Open a temporary file next to the final name."""
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the file. Leave nothing when the block failed."""
        if kind is None:
            try:
                self._flush()
            except BaseException as failure:
                # A failed flush must not publish a truncated file.
                self._writer.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._writer.__exit__(kind, error, trace)
