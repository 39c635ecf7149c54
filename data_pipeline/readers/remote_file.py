"""List and identify remote inputs: URLs of any protocol of fsspec, such as s3://, gs://,
https:// and memory://.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from llmsys.data_pipeline.readers.dataset_folders import DatasetFolder
from llmsys.errors import DataError
from llmsys.storage.object_store import get_entity_tag, open_file_system, suggest_storage_fix

_BLOCK = 1 << 20
ASKED_BY = "data.inputs"


def list_remote_files(pattern: str) -> tuple[list[str], bool]:
    """List the remote files that a pattern matches.

    Args:
        pattern: A URL, which may hold wildcards.

    Returns:
        URLs, and whether the pattern names a folder.

    Raises:
        DataError: The storage cannot be listed.
    """
    files, path = open_file_system(pattern, ASKED_BY)
    files.invalidate_cache()  # fsspec caches listings for the life of the process
    try:
        if not any(sign in path for sign in "*?["):
            return ([pattern], False) if files.isfile(path) else ([], bool(files.isdir(path)))
        found = files.glob(path, detail=True)
    except FileNotFoundError:
        return [], False
    except Exception as error:  # every storage has its own errors
        raise _build_list_error(pattern, files, error) from error
    return [
        str(files.unstrip_protocol(name))
        for name, about in found.items()
        if about["type"] == "file"
    ], False


def open_remote_folder(url: str) -> DatasetFolder:
    """Return the files below a remote folder.

    Raises:
        DataError: if the storage cannot be listed.
    """
    files, path = open_file_system(url, ASKED_BY)
    try:
        found = files.find(path)
    except Exception as error:  # every storage has its own errors
        raise _build_list_error(url, files, error) from error
    names = [str(name).removeprefix(path.rstrip("/")).lstrip("/") for name in found]
    return DatasetFolder(
        url.rstrip("/"),
        sorted(names),
        lambda name: str(files.read_text(f"{path.rstrip('/')}/{name}", errors="replace")),
    )


def _build_list_error(url: str, files: Any, error: Exception) -> DataError:
    reason = str(error).rstrip(".")
    return DataError(
        f"data.inputs: {url} cannot be listed: {reason}. {suggest_storage_fix(files, error)}"
    )


def get_remote_size(url: str) -> int:
    """Return the size of a remote file in bytes, 0 if the storage does not report it."""
    try:
        files, path = open_file_system(url, ASKED_BY)
        return int(files.info(path).get("size") or 0)
    except Exception:  # every storage has its own errors; reading reports it
        return 0


def get_remote_identity(url: str, content: Callable[[str], str]) -> str:
    """Identify the content of a remote file.

    Args:
        url: The file.
        content: Computes a digest of its bytes, for storages that report neither tag nor time.

    Returns:
        Entity tag or modification time with the size, else `content(url)`; "" if the file cannot
        be described: reading it reports the error.
    """
    try:
        files, path = open_file_system(url, ASKED_BY)
        about: dict[str, Any] = files.info(path)
    except Exception:  # every storage has its own errors; reading reports it
        return ""
    known = get_entity_tag(about)
    return f"{about.get('size')} {known}" if known else content(url)


def compute_remote_digest(url: str) -> str:
    """Return the blake2b (hex, 16 bytes) of a remote file, "" if it cannot be read."""
    state = hashlib.blake2b(digest_size=16)
    try:
        files, path = open_file_system(url, ASKED_BY)
        with files.open(path, "rb") as stream:
            while block := stream.read(_BLOCK):
                state.update(block)
    except Exception:  # every storage has its own errors; reading reports it
        return ""
    return state.hexdigest()
