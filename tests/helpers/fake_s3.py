"""A storage that speaks as much of S3 as s3fs asks for, on a port of this machine, and fails when
told to.

Reads, ranges, listings, writes, conditional writes, uploads in parts, and deletions. Gives `FakeS3`
with objects to be set and taken away, and `failures`: what the next answers for an object are
instead.
"""

import hashlib
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from llmsys.storage.object_store import open_object_folder
from llmsys.storage.range_cache import open_cache

ACCESS_KEY = "the-right-key"
BUCKETS = {"crawl", "bucket"}
_LIST = b"<ListBucketResult><IsTruncated>false</IsTruncated>%s</ListBucketResult>"
_ENTRY = (
    '<Contents><Key>{}</Key><Size>{}</Size><ETag>"{}"</ETag>'
    "<LastModified>{}</LastModified></Contents>"
)
_UPLOAD = b"<InitiateMultipartUploadResult><UploadId>%s</UploadId></InitiateMultipartUploadResult>"
_UPLOADED = b"<CompleteMultipartUploadResult><ETag>%s</ETag></CompleteMultipartUploadResult>"
_REFUSED = (
    b"<Error><Code>PreconditionFailed</Code><Message>At least one of the pre-conditions did not "
    b"hold.</Message><Condition>If-None-Match</Condition></Error>"
)
_CHANGED = "2024-05-01T12:00:00.000Z"


class StorageServer:
    """A server that answers as S3, at `url`."""

    url: str

    def connect(self, patch: pytest.MonkeyPatch, cache: Path) -> None:
        """Make this process, and those it starts, use this storage, with copies in a folder of
        their own.
        """
        for name, value in self.environment().items():
            patch.setenv(name, value)
        patch.setenv("LLMSYS_CACHE", str(cache))
        # Connections and caches are made once in a process.
        S3FileSystem.clear_instance_cache()
        for made_once in (open_object_folder, open_cache):
            made_once.cache_clear()

    def environment(self) -> dict[str, str]:
        """What a process must have in its environment to read from here."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # s3fs tries again by itself
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


class FakeS3(StorageServer):
    """Two buckets with the same objects.

    Attributes:
        objects: content by key.
        failures: for a key, what the next answers to GET are: a status such as 503, or "cut" for a
            body of which the second half never comes. For "PUT key", what those to PUT are.
        asked: the ranges that were asked for, by key.
        written: the keys that were written or deleted ("-key"), in order.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failures: dict[str, list[int | str]] = {}
        self.asked: dict[str, list[str]] = {}
        self.written: list[str] = []
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (_Handler,), {"s3": self})
        )
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # header and body in one packet, which nobody waits for
    s3: FakeS3

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._asked(body=False)

    def do_GET(self) -> None:
        self._asked(body=True)

    def handle_expect_100(self) -> bool:
        """Answer at once: a client waits for it before it sends the body."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def do_PUT(self) -> None:
        content, (key, query) = self._read_request()
        if failure := self._take_failure(f"PUT {key}"):
            self._error(int(failure), "SlowDown" if failure == 503 else "AccessDenied")
        elif "partNumber" in query:
            self.s3.parts[query["uploadId"]][int(query["partNumber"])] = content
            self._answer(200, b"", {"ETag": f'"{_tag(content)}"'})
        else:
            self._write(key, content)

    def do_POST(self) -> None:
        _, (key, query) = self._read_request()
        if "uploads" in query:
            name = f"upload-{len(self.s3.parts)}"
            self.s3.parts[name] = {}
            self._answer(200, _UPLOAD % name.encode(), {"Content-Type": "application/xml"})
        else:
            parts = self.s3.parts.pop(query["uploadId"])
            self._write(key, b"".join(parts[number] for number in sorted(parts)))

    def do_DELETE(self) -> None:
        _, (key, query) = self._read_request()
        with self.s3.lock:
            if "uploadId" in query:
                self.s3.parts.pop(query["uploadId"], None)
            elif self.s3.objects.pop(key, None) is not None:
                self.s3.written.append(f"-{key}")
        self._answer(204, b"", {})

    def _read_request(self) -> tuple[bytes, tuple[str, dict[str, str]]]:
        assert "aws-chunked" not in self.headers.get("Content-Encoding", "")
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        query = {
            name: values[0]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        return content, (unquote(parts.path).split("/", 2)[2], query)

    def _write(self, key: str, content: bytes) -> None:
        with self.s3.lock:
            is_refused = self.headers.get("If-None-Match") == "*" and key in self.s3.objects
            if not is_refused:
                self.s3.objects[key] = content
                self.s3.written.append(key)
        if is_refused:
            self._answer(412, _REFUSED, {"Content-Type": "application/xml"})
        else:
            about = _UPLOADED % _tag(content).encode() if self.command == "POST" else b""
            self._answer(200, about, {"ETag": f'"{_tag(content)}"'})

    def _take_failure(self, key: str) -> int | str | None:
        failures = self.s3.failures.get(key, [])
        return failures.pop(0) if failures else None

    def _asked(self, *, body: bool) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self._error(403, "InvalidAccessKeyId", body=body)
        elif bucket not in BUCKETS:
            self._error(404, "NoSuchBucket", body=body)
        elif key or not body:
            self._object(key, body=body)
        else:
            self._listing({name: values[0] for name, values in parse_qs(parts.query).items()})

    def _listing(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, folders = "", set()
        for key, content in sorted(self.s3.objects.items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                found += _ENTRY.format(escape(key), len(content), _tag(content), _CHANGED)
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in folders
        )
        self._answer(200, _LIST % found.encode(), {"Content-Type": "application/xml"})

    def _object(self, key: str, *, body: bool) -> None:
        content = self.s3.objects.get(key)
        if content is None:
            self._error(404, "NoSuchKey", body=body)
            return
        headers = {"ETag": f'"{_tag(content)}"', "Last-Modified": "Wed, 01 May 2024 12:00:00 GMT"}
        if not body:
            self._answer(200, b"", headers, length=len(content))
            return
        if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
            self._error(412, "PreconditionFailed")
            return
        self._part(key, content, headers)

    def _part(self, key: str, content: bytes, headers: dict[str, str]) -> None:
        asked = self.headers.get("Range", "")
        self.s3.asked.setdefault(key, []).append(asked)
        match = re.match(r"bytes=(\d+)-(\d*)", asked)
        start, stop = (
            (int(match[1]), int(match[2] or len(content)) + 1) if match else (0, len(content))
        )
        failure = self._take_failure(key)
        if isinstance(failure, int):
            self._error(
                failure,
                {503: "SlowDown", 403: "AccessDenied", 404: "NoSuchKey"}.get(
                    failure, "InternalError"
                ),
            )
            return
        part = content[start:stop]
        length = len(part)
        if failure == "cut":
            part, self.close_connection = part[: length // 2], True
        about = f"bytes {start}-{start + length - 1}/{len(content)}"
        self._answer(
            206 if match else 200,
            part,
            headers | ({"Content-Range": about} if match else {}),
            length=length,
        )

    def _error(self, status: int, code: str, *, body: bool = True) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} it is.</Message></Error>" if body else ""
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(
        self, status: int, content: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)


def _tag(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
