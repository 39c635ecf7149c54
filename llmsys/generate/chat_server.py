"""Serve a page of this machine on which a person talks to a model: text arrives token by token,
with probabilities. Programs use the routes of OpenAI's API (openai_routes.py).

Binds to 127.0.0.1 only. A request needs the host name of this machine and, where the browser sends
one, the page's own origin, so that no other page that is open in the browser can use the model.

Invariants:
- A page that is closed ends its text, and so does a program that closes its connection.
"""

import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from llmsys.errors import ConfigError, LlmsysError
from llmsys.generate.chat_model import CONTROLS, ChatModel
from llmsys.generate.openai_routes import (
    CHAT,
    COMPLETIONS,
    MODELS,
    Route,
    build_completion,
    build_error,
    format_event,
    list_models,
    parse_completion_request,
    stream_completion,
)

ADDRESS = "127.0.0.1"
MAX_REQUEST_BYTES = 1 << 20
PAGE = "/generate"
ROUTES: dict[str, Route] = {COMPLETIONS: COMPLETIONS, CHAT: CHAT}
JSON = "application/json"


def parse_request(content: bytes) -> dict[str, Any] | None:
    """Parse the body of a request.

    Args:
        content: The bytes.

    Returns:
        The object; None for other JSON, for what is none, and for halves of surrogate pairs, which
        no tokenizer takes.
    """
    try:
        request = json.loads(content)
        json.dumps(request, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def read_page() -> str:
    """Return the page, with the places of its nonce and its settings."""
    return resources.files("llmsys.generate").joinpath("chat.html").read_text("utf-8")


class ChatServer(ThreadingHTTPServer):
    """The server of one model; `port` 0 takes a free one."""

    daemon_threads = True

    def __init__(self, chat: ChatModel, port: int) -> None:
        """Bind to this machine; other machines cannot connect.

        Args:
            chat: The model that answers.
            port: TCP port; 0 takes a free one.

        Raises:
            ConfigError: The port cannot be used.
        """
        self.chat = chat
        try:
            super().__init__((ADDRESS, port), _ChatHandler)
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}). Give another one: --port 0"
            ) from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def is_own_request(self, host: str, origin: str | None) -> bool:
        """Return whether a request names this server and comes from its page, or from no page."""
        names = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        return host in names and (origin is None or origin.removeprefix("http://") in names)


class _ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        if self._is_rejected():
            return
        if self.path == MODELS:
            self._send_json(200, list_models(self.server.chat))
            return
        if self.path.partition("?")[0] != "/":
            self._send(404, b"not found", "text/plain")
            return
        chat = self.server.chat
        nonce = secrets.token_urlsafe(16)
        shown = {name: getattr(chat.config.generation, name) for name in CONTROLS}
        start = {"name": chat.config.run.name, "controls": shown, "chat": chat.chats is not None}
        text = read_page()
        # a closing tag in a run's name would end the script
        data = json.dumps(start).replace("<", "\\u003c")
        page = text.replace("{{nonce}}", nonce).replace("{{start}}", data)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'"
        )
        self._send(
            200,
            page.encode(),
            "text/html; charset=utf-8",
            policy + "; img-src data:; frame-ancestors 'none'",
        )

    def do_POST(self) -> None:
        if self._is_rejected():
            return
        length = self.headers.get("Content-Length") or ""
        # Digits of other scripts, which int() takes, are no length.
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
        is_json = self.headers.get_content_type() == JSON
        is_known = self.path == PAGE or self.path in ROUTES
        if not is_known or not is_json or not 0 < size <= MAX_REQUEST_BYTES:
            known = ", ".join((PAGE, *ROUTES))
            self._send(400, f"send JSON of at most 1 MiB to one of {known}".encode(), "text/plain")
            return
        request = parse_request(self.rfile.read(size))
        if request is None:
            self._send(400, b"send a JSON object of valid Unicode", "text/plain")
            return
        try:
            if self.path == PAGE:
                self._begin_stream("application/x-ndjson")
                self._stream_tokens(request)
            else:
                self._send_completion(ROUTES[self.path], request)
        except OSError:  # the page was closed
            self.close_connection = True

    def _stream_tokens(self, request: dict[str, Any]) -> None:
        def send(message: dict[str, Any]) -> None:
            self._write(json.dumps(message).encode() + b"\n")

        try:
            self.server.chat.continue_text(request, send)
        except LlmsysError as error:
            send({"error": str(error)})

    def _send_completion(self, route: Route, request: dict[str, Any]) -> None:
        chat = self.server.chat
        try:
            asked = parse_completion_request(chat, route, request)
            whole = None if asked.is_stream else build_completion(chat, route, asked)
        except LlmsysError as error:
            self._send_json(400, build_error(str(error)))
            return
        if whole is not None:
            self._send_json(200, whole)
            return
        self._begin_stream("text/event-stream")

        def send(values: dict[str, Any]) -> None:
            self._write(format_event(values))

        try:
            stream_completion(chat, route, asked, send)
        except LlmsysError as error:
            send(build_error(str(error)))
        self._write(format_event(None))

    def _begin_stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _write(self, content: bytes) -> None:
        self.wfile.write(content)
        self.wfile.flush()

    def _send_json(self, status: int, values: dict[str, Any]) -> None:
        self._send(status, json.dumps(values).encode(), JSON)

    def _is_rejected(self) -> bool:
        if self.server.is_own_request(self.headers.get("Host", ""), self.headers.get("Origin")):
            return False
        self._send(
            403, b"this page is for the machine it runs on: open it as 127.0.0.1", "text/plain"
        )
        return True

    def _send(
        self, status: int, content: bytes, kind: str, policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no requests."""
