"""Prompts of a model that was tuned on chats: messages in its chat template, up to the answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, DataError
from llmsys.train.chat_data import get_template_folder, load_file_tokenizer
from llmsys.vocabulary.chat_template import (
    ASSISTANT,
    ChatTemplate,
    MessageError,
    encode_chat,
    load_chat_template,
)
from llmsys.vocabulary.tokenizer import TextTokenizer


@dataclass(frozen=True)
class ChatFormat:
    """A chat template with its tokenizer.

    Attributes:
        stop_ids: The control token that ends an answer; none where the end-of-document id does.
    """

    template: ChatTemplate
    tokenizer: TextTokenizer
    stop_ids: tuple[int, ...]

    def encode_question(self, text: str) -> list[int]:
        """Return the ids of a single message of the user, up to the answer."""
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of messages, up to the next answer.

        Raises:
            DataError: The template rejects them, or one spells a control token.
        """
        for control in self.tokenizer.get_control_pieces():
            if any(control in str(value) for message in messages for value in message.values()):
                raise DataError(
                    f"a message spells the control token {control}. Write it in another way."
                )
        try:
            text = self.template.render_prompt(messages)
        except MessageError as error:
            raise DataError(
                f"{self.template.location} rejects the messages: {error}. Correct them."
            ) from None
        return self.tokenizer.encode_controls(text).ids


def load_chat_format(config: RunConfig) -> ChatFormat | None:
    """Load the chat template of a run.

    Args:
        config: The config of the run.

    Returns:
        The format of prompts; None where they are plain text, by `generation.format`.

    Raises:
        ConfigError: generation.format=chat, and there is no template.
        DataError: The template cannot be used.
    """
    if not is_answered_as_chat(config):
        return None
    tokenizer = load_file_tokenizer(config, "generation.format=chat")
    template = load_chat_template(get_template_folder(config), tokenizer)
    try:
        chat = template.render_chat(
            [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        )
    except MessageError as error:
        raise ConfigError(
            f"{template.location} rejects a question and an answer: {error}. Correct it."
        ) from None
    ids, is_answer = encode_chat(tokenizer, chat)
    controls = set(tokenizer.get_control_pieces().values())
    ends = [
        token for token, is_own in zip(ids, is_answer, strict=True) if is_own and token in controls
    ]
    return ChatFormat(template, tokenizer, tuple(ends[-1:]))


def is_answered_as_chat(config: RunConfig) -> bool:
    """Return whether prompts are messages of a user, by `generation.format`.

    Args:
        config: The config of the run.

    Returns:
        True after training on chats, unless the config says otherwise.
    """
    setting = config.generation.format
    return setting == "chat" or (setting == "auto" and config.data.kind == "chat")
