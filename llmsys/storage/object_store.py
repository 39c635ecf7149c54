"""Objects of a remote folder such as s3://bucket/folder: list, read, write and delete them through
fsspec.

fsspec is imported only when a URL is used. A missing package is reported with the command that
installs it.

Invariants:
- An object is written whole or not at all, and only `create` decides a race between two writers.
- What a storage cannot do for now (throttling, a lost connection) is repeated for RETRY_SECONDS.
  One that never answered is asked for FIRST_CONTACT_SECONDS, because its address may be wrong.
  Every other error ends with what to do.
"""

import errno
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from llmsys.errors import DataError
from llmsys.log import get_logger

Value = TypeVar("Value")

# An outage of this length is survived. s3fs itself repeats a request for about a second.
RETRY_SECONDS = 300.0
FIRST_CONTACT_SECONDS = 30.0
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_PACKAGES = {
    "s3": "'llmsys[s3]'",
    "s3a": "'llmsys[s3]'",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}
_ENTITY_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "crc32c")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_NO_CONNECTION = frozenset(
    (
        errno.ECONNRESET,
        errno.ECONNREFUSED,
        errno.ECONNABORTED,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.ETIMEDOUT,
        errno.EPIPE,
    )
)
# Errors of the system that another try may not meet; s3fs translates those of S3 into these.
_PASSING = _NO_CONNECTION | {errno.EBUSY, errno.EIO, errno.EREMOTEIO}
_ABSENT = (FileNotFoundError, FileExistsError)
# Python's, botocore's and aiohttp's base classes of a server that did not answer; the packages are
# imported only where a URL is used.
_UNANSWERED = frozenset(
    ("ConnectionError", "TimeoutError", "HTTPClientError", "ClientConnectionError")
)

log = get_logger(__name__)
sleep = time.sleep


def open_file_system(url: str, asked_by: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it.

    Args:
        url: A URL of any protocol of fsspec.
        asked_by: The key of the config, for errors.
        options: Options of the file system.

    Returns:
        The file system, which is shared in this process, and the path.

    Raises:
        DataError: The URL names no bucket, its protocol is unknown or its package is missing.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    protocol, _, rest = url.partition("://")
    if protocol in _PACKAGES and (not rest or rest.startswith("/")):
        raise DataError(
            f"{asked_by}: {url} names no bucket. Write {protocol}://BUCKET/FOLDER/FILE."
        )
    try:
        return url_to_fs(url, **options)  # type: ignore[no-any-return]
    except ImportError as error:
        package = _PACKAGES.get(
            protocol,
            {"http": "aiohttp", "https": "aiohttp"}.get(protocol, "the package named above"),
        )
        raise DataError(
            f"{asked_by}: {url} needs a package that is not installed: {error}. Run: pip install "
            f"{package}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{asked_by}: {url} cannot be read: {error}. Use a protocol that fsspec knows."
        ) from error


def suggest_storage_fix(files: Any, error: Exception) -> str:
    """Return the next step after an error of a storage.

    Args:
        files: The fsspec file system.
        error: Its error.

    Returns:
        A sentence.
    """
    if (
        not isinstance(error, PermissionError)
        and "credentials" not in type(error).__name__.lower() + str(error).lower()
    ):
        return "Check the URL, credentials and network."
    protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
    names = (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        if "s3" in protocols
        else "as its package says"
    )
    return (
        f"Set credentials that may list and read it in the environment ({names}), then run the "
        "same command again."
    )


def get_entity_tag(about: dict[str, Any]) -> str:
    """Return the entity tag, or else the modification time, of a file.

    Args:
        about: Fsspec's description of the file.

    Returns:
        Name and value; "" without either.
    """
    return next((f"{key}={about[key]}" for key in (*_ENTITY_TAGS, *_TIMES) if about.get(key)), "")


class RemoteObject(NamedTuple):
    """Description of one object.

    Attributes:
        size: Bytes.
        tag: Entity tag: another one means other bytes.
        modified: Time of the last write, as text.
    """

    size: int
    tag: str
    modified: str


class ObjectFolder:
    """The objects below a URL, by name relative to it. Threads may use it at the same time."""

    def __init__(self, url: str, asked_by: str = "folder") -> None:
        """Connect to a URL; DataError when its package is missing."""
        self.url = url.rstrip("/")
        # Another process may write the objects at any time.
        self._files, self._path = open_file_system(self.url, asked_by, use_listings_cache=False)
        self._has_answered = False

    def list_objects(self, prefix: str = "") -> dict[str, RemoteObject]:
        """List the objects of a folder.

        Args:
            prefix: A folder in this one; "" lists all.

        Returns:
            Descriptions by name, in order of names.

        Raises:
            DataError: The storage refused for good, after retries.
        """
        found = self._call(prefix, lambda path: self._files.find(path, detail=True))
        cut = len(self._path) + 1
        return {
            name[cut:]: _describe(about)
            for name, about in sorted(found.items())
            if about["type"] == "file"
        }

    def find_object(self, name: str) -> RemoteObject | None:
        """Find the description of an object.

        Args:
            name: Its name in this folder.

        Returns:
            Size, time and tag; None if there is none.
        """
        try:
            about = self._call(name, self._files.info)
        except FileNotFoundError:
            return None
        return _describe(about) if about["type"] == "file" else None

    def find_bytes(self, name: str) -> bytes | None:
        """Read an object as a whole.

        Args:
            name: Its name in this folder.

        Returns:
            Its bytes; None if there is none.
        """
        try:
            return bytes(self._call(name, self._files.cat_file))
        except FileNotFoundError:
            return None

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        """Read a range of an object.

        Args:
            name: Its name in this folder.
            begin: First byte.
            end: End of the range.

        Returns:
            The bytes; fewer where the object ends.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return bytes(
            self._call(name, lambda path: self._files.cat_file(path, start=begin, end=end))
        )

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write an object, replacing one that is there. Readers see the old or the new one.

        Args:
            name: Its name in this folder.
            data: Its bytes.
        """
        self._call(name, lambda path: self._files.pipe_file(path, data), is_write=True)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object unless there is one: of several writers one succeeds.

        Args:
            name: Its name in this folder.
            data: Its bytes.

        Returns:
            Whether it was written.
        """

        def put(path: str) -> None:
            try:
                self._files.pipe_file(path, data, mode="create")
            except OSError as error:
                # Not every server says in its answer 412 which condition failed.
                if error.errno == errno.EINVAL and "condition" in str(error).lower():
                    raise FileExistsError(errno.EEXIST, str(error)) from error
                raise

        try:
            self._call(name, put, is_write=True)
        except FileExistsError:
            # It may be ours: an answer that was lost makes s3fs ask again.
            return self.find_bytes(name) == data
        return True

    def upload(self, path: Path, name: str) -> RemoteObject:
        """Write an object from a file.

        Args:
            path: The file.
            name: The name of the object in this folder.

        Returns:
            The description of the object.

        Raises:
            DataError: The object is not there as it was written: another process changes the
                folder.
        """
        size = path.stat().st_size
        self._call(name, lambda target: self._files.put_file(str(path), target), is_write=True)
        found = self.find_object(name)
        if found is None or found.size < size:
            raise DataError(
                f"{self.url}/{name} is not there as it was written: another process changes the "
                "folder. End it, then run the same command again."
            )
        return found

    def download(self, name: str, path: Path) -> None:
        """Copy an object into a file, which appears when it is complete.

        Args:
            name: The name of the object in this folder.
            path: The file.

        Raises:
            FileNotFoundError: There is no such object.
        """
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._call(name, lambda source: self._files.get_file(source, str(aside)))
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        """Delete an object if it is there.

        Args:
            name: Its name in this folder.
        """
        try:
            self._call(name, self._files.rm_file)
        except FileNotFoundError:
            return

    def _call(self, name: str, request: Callable[[str], Value], is_write: bool = False) -> Value:
        path = f"{self._path}/{name}" if name else self._path
        waited = 0.0
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                found = request(path)
                self._has_answered = True
                return found
            except Exception as error:  # every storage has its own errors
                self._has_answered |= not _is_unanswered(error)
                longest = RETRY_SECONDS if self._has_answered else FIRST_CONTACT_SECONDS
                if isinstance(error, _ABSENT) and not (
                    is_write and isinstance(error, FileNotFoundError)
                ):
                    raise
                if not _is_passing(error) or waited >= longest:
                    raise self._build_error(name, error, waited) from error
                log.warning(
                    "%s/%s: %s; asking again in %g s", self.url, name, _get_reason(error), wait
                )
            sleep(wait)
            waited = waited + wait
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _build_error(self, name: str, error: Exception, waited: float) -> DataError:
        shown = f"{self.url}/{name}".rstrip("/")
        reason = _get_reason(error)
        if isinstance(error, FileNotFoundError):
            return DataError(
                f"{shown} cannot be written: {reason}. Create the bucket, then run the same "
                "command again."
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DataError(
                f"{shown} cannot be copied to this machine: {reason}. Free space, or set "
                "LLMSYS_CACHE to a folder on a larger disk; then run the same command again to "
                "continue."
            )
        if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
            return DataError(
                f"{shown} was refused: {reason}. Set credentials that may list, read, write and "
                "delete it (expired ones must be renewed) in the environment (AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or AWS_PROFILE), then run the same "
                "command again to continue."
            )
        tries = f" for {waited:.0f} s" if waited else ""
        if not self._has_answered:
            return DataError(
                f"{shown} could not be reached{tries}, and never answered: {reason}. Correct the "
                "address of the storage (AWS_ENDPOINT_URL_S3 for a server other than Amazon's), or "
                "check the network; then run the same command again."
            )
        return DataError(
            f"{shown} could not be reached{tries}: {reason}. Check the URL, the network and the "
            "limits of the storage, then run the same command again to continue."
        )


@cache
def open_object_folder(url: str) -> ObjectFolder:
    """Return the objects below a URL.

    Args:
        url: The URL of a remote folder.

    Returns:
        The same folder whenever this process asks.
    """
    return ObjectFolder(url)


def _describe(about: dict[str, Any]) -> RemoteObject:
    modified = next((str(about[key]) for key in _TIMES if about.get(key)), "at an unknown time")
    return RemoteObject(int(about["size"] or 0), get_entity_tag(about), modified)


def _get_reason(error: Exception) -> str:
    return (str(error) or type(error).__name__).rstrip(".")


def _is_unanswered(error: Exception) -> bool:
    """Return whether no server answered."""
    names = {base.__name__ for base in type(error).__mro__}
    return not names.isdisjoint(_UNANSWERED) or getattr(error, "errno", None) in _NO_CONNECTION


def _is_passing(error: Exception) -> bool:
    """Return whether another try may succeed."""
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return False
    if isinstance(error, OSError) and not isinstance(error, TimeoutError | ConnectionError):
        return error.errno in _PASSING
    # Errors of botocore and aiohttp about a connection are none of Python's.
    return not isinstance(
        error, ValueError | TypeError | LookupError | ImportError | NotImplementedError
    )
