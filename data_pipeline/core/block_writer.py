"""Writers whose last rows wait in memory until their block ends."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from llmsys.token_shards import ArrowFileWriter


class BlockWriter(ABC):
    """A file that is published when its block ends, with what waits; or not at all when the block failed."""

    def __init__(self, writer: ArrowFileWriter) -> None:
        self._writer = writer

    @abstractmethod
    def _flush(self) -> None:
        """Write what waits."""

    def __enter__(self) -> Self:
        """Open the file aside."""
        self._writer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the file, or leave nothing when the block failed."""
        if kind is None:
            try:
                self._flush()
            except BaseException as failure:
                self._writer.__exit__(type(failure), failure, failure.__traceback__)
                raise
        self._writer.__exit__(kind, error, trace)
