"""A storage that speaks as much of S3 as s3fs asks for, on a port of this machine, and fails when told to.

Gives `FakeS3` with objects to be set and taken away, and `failures`: what the next answers for an object are instead.
"""

import hashlib
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

ACCESS_KEY = "the-right-key"
_LIST = b"<ListBucketResult><IsTruncated>false</IsTruncated>%s</ListBucketResult>"
_ENTRY = '<Contents><Key>{}</Key><Size>{}</Size><ETag>"{}"</ETag><LastModified>{}</LastModified></Contents>'
_CHANGED = "2024-05-01T12:00:00.000Z"


class FakeS3:
    """One bucket, "crawl".

    Attributes:
        objects: content by key.
        failures: for a key, what the next answers to GET are: a status such as 503, or "cut" for a body of which the
            second half never comes.
        asked: the ranges that were asked for, by key.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failures: dict[str, list[int | str]] = {}
        self.asked: dict[str, list[str]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"s3": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

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

    def _asked(self, *, body: bool) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            self._error(403, "InvalidAccessKeyId", body=body)
        elif bucket != "crawl":
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
        found += "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in folders)
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
        start, stop = (int(match[1]), int(match[2] or len(content)) + 1) if match else (0, len(content))
        failures = self.s3.failures.get(key, [])
        failure = failures.pop(0) if failures else None
        if isinstance(failure, int):
            self._error(failure, {503: "SlowDown", 403: "AccessDenied", 404: "NoSuchKey"}.get(failure, "InternalError"))
            return
        part = content[start:stop]
        length = len(part)
        if failure == "cut":
            part, self.close_connection = part[: length // 2], True
        about = f"bytes {start}-{start + length - 1}/{len(content)}"
        self._answer(206 if match else 200, part, headers | ({"Content-Range": about} if match else {}), length=length)

    def _error(self, status: int, code: str, *, body: bool = True) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} it is.</Message></Error>" if body else ""
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)


def _tag(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()
