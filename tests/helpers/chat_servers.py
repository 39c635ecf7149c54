"""A server of a tiny model whose tokens are characters."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmsys.config.run import RunConfig
from llmsys.generate.chat_model import ChatModel
from llmsys.generate.chat_server import ChatServer
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model

LETTERS = "\0abcdefghijklmnopqrstuvwxyz .,!?\n<>'é:"


class FewLetters:
    """One id per character; the end of a document is 0, which is no text."""

    vocab_size, bos_id, eos_id, fingerprint = len(LETTERS), -1, 0, ""

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[number] for number in ids if number)


def build_chat_model(name: str, **model: int) -> ChatModel:
    """Return a tiny model, of a run with a name."""
    config = build_tiny_config(vocab_size=len(LETTERS), **model)
    run = RunConfig.model_validate(
        {
            "run": {"name": name},
            "model": config.model_dump(),
            "batch": {"sequence_length": 32},
            "generation": {"max_new_tokens": 12},
        }
    )
    return ChatModel(build_tiny_model(config), FewLetters(), run)  # type: ignore[arg-type]


@contextmanager
def serve(chat: ChatModel) -> Iterator[ChatServer]:
    """Serve a model on a free port."""
    with ChatServer(chat, 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
