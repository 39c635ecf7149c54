"""Open remote files: URLs of any protocol of fsspec, such as s3://, gs://, https:// and memory://.

fsspec is imported only when an input is a URL. A missing package is reported with the command that installs it.
"""

import hashlib
from collections.abc import Callable
from typing import Any

from data_pipeline.readers.dataset_folders import DatasetFolder
from llmsys.errors import DataError

_PACKAGES = {"s3": "'llmsys[s3]'", "s3a": "'llmsys[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_ENTITY_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "crc32c")
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_BLOCK = 1 << 20


def open_file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it.

    Raises:
        DataError: if the protocol is unknown or its package is missing.
    """
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    protocol = url.split("://", 1)[0]
    try:
        return url_to_fs(url)  # type: ignore[no-any-return]
    except ImportError as error:
        package = _PACKAGES.get(
            protocol, {"http": "aiohttp", "https": "aiohttp"}.get(protocol, "the package named above")
        )
        raise DataError(
            f"data.inputs: {url} needs a package that is not installed: {error}. Run: pip install {package}"
        ) from error
    except ValueError as error:
        raise DataError(f"data.inputs: {url} cannot be read: {error}. Use a protocol that fsspec knows.") from error


def list_remote_files(pattern: str) -> tuple[list[str], bool]:
    """Return the URLs of the files that a pattern matches, and whether it names a folder.

    Raises:
        DataError: if the storage cannot be listed.
    """
    files, path = open_file_system(pattern)
    files.invalidate_cache()  # fsspec caches listings for the life of the process
    try:
        if not any(sign in path for sign in "*?["):
            return ([pattern], False) if files.isfile(path) else ([], bool(files.isdir(path)))
        found = files.glob(path, detail=True)
    except FileNotFoundError:
        return [], False
    except Exception as error:  # every storage has errors of its own
        raise _build_list_error(pattern, files, error) from error
    return [str(files.unstrip_protocol(name)) for name, about in found.items() if about["type"] == "file"], False


def open_remote_folder(url: str) -> DatasetFolder:
    """Return the files below a remote folder.

    Raises:
        DataError: if the storage cannot be listed.
    """
    files, path = open_file_system(url)
    try:
        found = files.find(path)
    except Exception as error:  # every storage has errors of its own
        raise _build_list_error(url, files, error) from error
    names = [str(name).removeprefix(path.rstrip("/")).lstrip("/") for name in found]
    return DatasetFolder(
        url.rstrip("/"),
        sorted(names),
        lambda name: str(files.read_text(f"{path.rstrip('/')}/{name}", errors="replace")),
    )


def _build_list_error(url: str, files: Any, error: Exception) -> DataError:
    reason = str(error).rstrip(".")
    return DataError(f"data.inputs: {url} cannot be listed: {reason}. {_suggest_fix(files, error)}")


def _suggest_fix(files: Any, error: Exception) -> str:
    """Return the suggested fix for a storage that cannot be listed."""
    if not isinstance(error, PermissionError) and "credentials" not in str(error).lower():
        return "Check the URL, credentials and network."
    protocols = (files.protocol,) if isinstance(files.protocol, str) else files.protocol
    names = (
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE" if "s3" in protocols else "as its package says"
    )
    return f"Set credentials that may list and read it in the environment ({names}), then run the same command again."


def get_remote_size(url: str) -> int:
    """Return the size of a remote file in bytes, 0 if the storage does not report it."""
    try:
        files, path = open_file_system(url)
        return int(files.info(path).get("size") or 0)
    except Exception:  # every storage has errors of its own; reading reports it
        return 0


def get_remote_identity(url: str, content: Callable[[str], str]) -> str:
    """Return the entity tag or modification time with the size; `content(url)` if the storage reports neither.

    "" if the file cannot be described: reading it reports the error.
    """
    try:
        files, path = open_file_system(url)
        about: dict[str, Any] = files.info(path)
    except Exception:  # every storage has errors of its own; reading reports it
        return ""
    known = get_entity_tag(about)
    return f"{about.get('size')} {known}" if known else content(url)


def get_entity_tag(about: dict[str, Any]) -> str:
    """Return the entity tag, or else the modification time, in fsspec's description of a file; "" without either."""
    return next((f"{key}={about[key]}" for key in (*_ENTITY_TAGS, *_TIMES) if about.get(key)), "")


def compute_remote_digest(url: str) -> str:
    """Return the blake2b (hex, 16 bytes) of a remote file, "" if it cannot be read."""
    state = hashlib.blake2b(digest_size=16)
    try:
        files, path = open_file_system(url)
        with files.open(path, "rb") as stream:
            while block := stream.read(_BLOCK):
                state.update(block)
    except Exception:  # every storage has errors of its own; reading reports it
        return ""
    return state.hexdigest()
