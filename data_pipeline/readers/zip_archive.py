"""Read the members of a zip archive as files of their own, one after the other.

Reads an archive by its directory; yields what `read_member` yields for each member, with the file
`archive.zip/member`. Nothing is unpacked into a folder.

Invariants:
- Memory is bounded: a member is decoded forward with a window. One that is not read in order, such
  as parquet, is decoded once into a temporary file, of at most `_SPOOL_BYTES`.
- An archive decodes to at most `MAX_RATIO` times its bytes, and some more, and has at most
  `MAX_MEMBERS` members.
- A member that is damaged, encrypted, compressed in another way or in an archive itself is one
  `SkippedRecord`; the members after it are read.
"""

import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import IO

from llmsys.data_pipeline.readers.input_stream import InputStream, ReadError
from llmsys.data_pipeline.readers.page_batch import (
    NonPageRecord,
    Page,
    SkippedRecord,
    remove_invalid_characters,
)

MAX_MEMBERS = 200_000
MAX_RATIO = 200  # text compresses 3 to 20 times; deflate at most 1,032 times
FREE_BYTES = 16 << 20  # that a member and an archive may decode to whatever their size is
_DIRECTORY_BYTES = 32 << 20  # of a directory; Python takes about ten times as much to hold it
_WINDOW = 1 << 20
_STEP = 1 << 18
_SPOOL_BYTES = 4 << 30
_SPOOL_MEMORY = 8 << 20
_ENCRYPTED = 1  # bit of the flags
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
_END = b"PK\x05\x06"
_END_BYTES = 22
_LONGEST_COMMENT = (1 << 16) - 1
_SIZE_OF_DIRECTORY = slice(12, 16)  # in the end record
_LOCATOR = b"PK\x06\x07"
_LOCATOR_BYTES = 20
_LARGE_END_BYTES = 56 + _LOCATOR_BYTES
_SIZE_OF_LARGE_DIRECTORY = slice(40, 48)
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    LookupError,
)

Record = Page | SkippedRecord | NonPageRecord


class MemberDamageError(OSError):
    """The bytes of a member cannot be decoded."""


def read_zip(
    source: InputStream, read_member: Callable[[InputStream], Iterator[Record]]
) -> Iterator[Record]:
    """Read a zip archive.

    Args:
        source: The archive.
        read_member: Yields the records of a member, whose `path` is its name.

    Yields:
        The records of all members, in the order of the directory, and a `SkippedRecord` for each
        member that is not read, or for an archive whose directory is damaged.

    Raises:
        ReadError: if the storage failed.
    """
    try:
        _check_directory(source)
        archive = zipfile.ZipFile(source)
    except ReadError:
        raise
    except _DAMAGE as error:
        yield SkippedRecord(source.path, 0, f"damaged zip archive: {error}")
        return
    members = [member for member in archive.infolist() if not member.is_dir()]
    if len(members) > MAX_MEMBERS:
        reason = f"a zip archive of {len(members)} files: split it, at most {MAX_MEMBERS} in each"
        yield SkippedRecord(source.path, 0, reason)
        return
    left = MAX_RATIO * source.size + FREE_BYTES
    for member in members:
        name = f"{source.path}/{_clean_name(member.filename)}"
        problem = _find_problem(member, left)
        if problem is not None:
            yield SkippedRecord(name, 0, problem)
            continue
        left -= member.file_size
        yield from _read_one(archive, member, name, read_member)


def _check_directory(source: InputStream) -> None:
    """Refuse a directory that would take too much memory, before zipfile reads it."""
    begin = max(0, source.size - _END_BYTES - _LONGEST_COMMENT)
    tail = source.read_block(begin, source.size - begin)
    place = tail.rfind(_END)
    if place < 0:
        raise zipfile.BadZipFile("its directory, at the end of the file, is missing")
    size = int.from_bytes(tail[place:][_SIZE_OF_DIRECTORY], "little")
    # Large archives have another end record before this one, and a locator between them.
    large = source.read_block(begin + place - _LARGE_END_BYTES, _LARGE_END_BYTES)
    if large[-_LOCATOR_BYTES:].startswith(_LOCATOR):
        size = int.from_bytes(large[_SIZE_OF_LARGE_DIRECTORY], "little")
    if size > _DIRECTORY_BYTES:
        raise zipfile.BadZipFile(
            f"its directory takes {size} bytes, and at most {_DIRECTORY_BYTES} are read: split it"
        )


def _clean_name(name: str) -> str:
    name = remove_invalid_characters(name)
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _find_problem(member: zipfile.ZipInfo, left: int) -> str | None:
    """Return why a member is not read; `left` is the number of bytes that the archive may still
    decode to.
    """
    if member.flag_bits & _ENCRYPTED:
        return "encrypted: unpack the archive with its password"
    if member.compress_type not in _METHODS:
        return f"compressed by method {member.compress_type} of zip: pack it with deflate"
    if member.file_size > MAX_RATIO * member.compress_size + FREE_BYTES or member.file_size > left:
        return (
            f"{member.file_size} bytes from {member.compress_size}, as in a zip bomb: unpack the "
            "archive if you trust it"
        )
    return None if member.file_size else "empty file"


def _read_one(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    name: str,
    read_member: Callable[[InputStream], Iterator[Record]],
) -> Iterator[Record]:
    with _MemberStream(archive, member, name) as stream:
        try:
            for found in read_member(stream):
                yield replace(found, file=name) if isinstance(found, Page) else found
            stream.check_end()
        except MemberDamageError as error:
            yield SkippedRecord(name, stream.decoded, f"damaged in the zip archive: {error}")


class _MemberStream(InputStream):
    """The decoded bytes of a member.

    Attributes:
        decoded: Bytes decoded so far.
    """

    def __init__(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> None:
        # No file is opened: the archive is.
        self.path = name
        self.max_attempts = 1
        self.start = self.work = self._position = self._bytes = 0
        self.size = member.file_size
        self._opened = None
        self._archive = archive
        self._member = member
        self._reader: IO[bytes] | None = None
        self._window = bytearray()  # the last bytes that were decoded
        self._spool: IO[bytes] | None = None
        self.decoded = 0

    def read_block(self, position: int, size: int) -> bytes:
        """Read bytes without moving the position of `read`.

        Args:
            position: First byte.
            size: Number of bytes.

        Returns:
            `size` bytes; fewer where the member ends before.

        Raises:
            MemberDamageError: The member cannot be decoded.
            ReadError: The storage failed.
        """
        wanted = max(0, min(size, self.size - position)) if position >= 0 else 0
        if not wanted:
            return b""
        self.work += wanted
        if self._spool is None and position < self.decoded - len(self._window):
            self._spool = self._decode_to_file()
        if self._spool is not None:
            self._spool.seek(position)
            return self._spool.read(wanted)
        self._decode_window(position, position + wanted)
        begin = position - (self.decoded - len(self._window))
        return bytes(memoryview(self._window)[begin : begin + wanted])

    def check_end(self) -> None:
        """Decode what a reader left, so that damage is found where a reader ended before it.

        Raises:
            MemberDamageError: The rest cannot be decoded, or the checksum of the member is another.
        """
        if self._spool is None:
            self._decode_window(self.size, self.size)
            # zipfile compares the checksum with the last bytes, or where none is left.
            self._decode_piece()

    def _decode_window(self, begin: int, end: int) -> None:
        """Decode up to `end`; bytes from `begin` on, and some before it, are in the window."""
        while self.decoded < end:
            piece = self._decode_piece()
            if not piece:
                raise MemberDamageError(f"it ends at byte {self.decoded} of {self.size}")
            self._window += piece
            self.decoded += len(piece)
            surplus = min(begin, self.decoded) - (self.decoded - len(self._window)) - _WINDOW
            if surplus > _WINDOW:
                del self._window[:surplus]

    def _decode_piece(self) -> bytes:
        try:
            if self._reader is None:
                self._reader = self._archive.open(self._member)
            return self._reader.read(_STEP)
        except ReadError:
            raise
        except _DAMAGE as error:
            raise MemberDamageError(str(error) or type(error).__name__) from error

    def _decode_to_file(self) -> IO[bytes]:
        """Return a temporary file with the whole member."""
        if self.size > _SPOOL_BYTES:
            raise MemberDamageError(
                f"{self.size} bytes that are not read in order: unpack the archive"
            )
        self._reader = None
        spool: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOL_MEMORY)  # noqa: SIM115
        while piece := self._decode_piece():
            spool.write(piece)
        if spool.tell() < self.size:
            raise MemberDamageError(f"it ends at byte {spool.tell()} of {self.size}")
        return spool

    def close(self) -> None:
        """Close the decoder and the temporary file."""
        for file in (self._reader, self._spool):
            if file is not None:
                file.close()
        super().close()
