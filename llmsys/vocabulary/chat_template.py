"""Render messages with a tokenizer's chat template, and find the tokens that the assistant writes.

Reads chat_template.jinja or `chat_template` of tokenizer_config.json. Templates run in jinja2's
sandbox, with the extensions, filters and globals that transformers gives them, but without a clock:
equal messages give equal text.

The assistant's text is what `{% generation %}` encloses. A template without it is rendered once for
each answer: up to the answer with `add_generation_prompt`, and with the answer. Both have to be
prefixes of the whole.
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llmsys.errors import DataError
from llmsys.vocabulary.special_tokens import CONFIG_NAME, read_json_object
from llmsys.vocabulary.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from jinja2 import Environment, Template

TEMPLATE_NAME = "chat_template.jinja"
ASSISTANT = "assistant"
# Noncharacters around the assistant's text; no interchanged text has them.
BEGIN = "\ufdd0"
END = "\ufdd1"
Messages = Sequence[Mapping[str, Any]]


class MessageError(ValueError):
    """Messages that a template does not render."""


class RenderedChat(NamedTuple):
    """The text of a chat, and the ranges of characters that the assistant writes."""

    text: str
    answers: tuple[tuple[int, int], ...]


class EncodedChat(NamedTuple):
    """Token ids of a chat, and for each whether the assistant writes it."""

    ids: list[int]
    is_answer: list[bool]


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the special tokens that it may name, such as `bos_token`.

    Attributes:
        source: The Jinja source.
        special_tokens: Values of the variables `bos_token`, `eos_token` and so on.
        location: File of the template, for messages.
    """

    source: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    location: str = "the chat template"

    @cached_property
    def _template(self) -> "Template":
        from jinja2 import TemplateError

        try:
            return _build_environment().from_string(self.source)
        except TemplateError as error:
            line = f" in line {number}" if (number := getattr(error, "lineno", None)) else ""
            raise DataError(
                f"{self.location} is no Jinja template: {error}{line}. Correct it."
            ) from None

    def check(self) -> None:
        """Raise DataError if the template cannot be compiled, or its answers cannot be found."""
        with contextlib.suppress(MessageError):  # it may want other messages than these
            self.render_chat(
                [{"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}] * 2
            )

    def render_prompt(self, messages: Messages) -> str:
        """Render messages up to the next answer.

        Args:
            messages: The messages so far, the last one being what is answered.

        Returns:
            The text of the messages, and what opens an answer.

        Raises:
            MessageError: The template rejects the messages.
        """
        return self._render(messages, add_generation_prompt=True)

    def render_chat(self, messages: Messages, tools: object = None) -> RenderedChat:
        """Return the text of a chat with the ranges of its answers.

        Args:
            messages: Mappings with `role` and `content`.
            tools: Passed to the template.

        Raises:
            MessageError: The template rejects the messages.
            DataError: The template has no `{% generation %}`, and an answer does not begin or end
                where the template renders the messages up to it.
        """
        marked = self._render_marked(messages, tools=tools)
        if BEGIN in marked:
            return _split_marked_text(marked)
        answers = []
        for number, message in enumerate(messages):
            if message.get("role") == ASSISTANT:
                before = self._render(messages[:number], tools=tools, add_generation_prompt=True)
                through = self._render(messages[: number + 1], tools=tools)
                self._require_prefix(before, through, number, "before it")
                self._require_prefix(through, marked, number, "up to it")
                answers.append((len(before), len(through)))
        return RenderedChat(marked, tuple(answers))

    def _require_prefix(self, part: str, whole: str, number: int, which: str) -> None:
        if whole.startswith(part):
            return
        at = next(
            (at for at, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), len(whole)
        )
        raise DataError(
            f"{self.location} renders message {number} (assistant) differently when it is "
            f"followed: the messages {which} give …{part[at : at + 30]!r}, and the whole chat "
            f"…{whole[at : at + 30]!r} there. Enclose what the assistant writes in {{% generation "
            "%} and {% endgeneration %}."
        )

    def _render(self, messages: Messages, **values: Any) -> str:
        return self._render_marked(messages, **values).replace(BEGIN, "").replace(END, "")

    def _render_marked(self, messages: Messages, **values: Any) -> str:
        from jinja2 import TemplateError

        from llmsys.vocabulary.template_limits import LimitedEnvironment, TemplateLimitError

        given = {"add_generation_prompt": False, "tools": None, "documents": None, **values}
        template = self._template
        environment = template.environment
        assert isinstance(environment, LimitedEnvironment)
        environment.start()
        try:
            return template.render(messages=list(messages), **self.special_tokens, **given)
        except TemplateLimitError as error:
            raise DataError(f"{self.location}: {error}") from None
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise MessageError(str(error) or type(error).__name__) from None


def _split_marked_text(marked: str) -> RenderedChat:
    """Return text and answers of a text with marks; an answer inside of another is part of it."""
    pieces = []
    answers = []
    depth = 0
    position = 0
    start = 0
    for piece in re.split(f"([{BEGIN}{END}])", marked):
        if piece == BEGIN:
            depth, start = depth + 1, position if depth == 0 else start
        elif piece == END:
            depth -= 1
            if depth == 0:
                answers.append((start, position))
        else:
            pieces.append(piece)
            position += len(piece)
    return RenderedChat("".join(pieces), tuple(answers))


def encode_chat(tokenizer: TextTokenizer, chat: RenderedChat) -> EncodedChat:
    """Encode a rendered chat; a control token that the text spells becomes its id.

    Args:
        tokenizer: The tokenizer.
        chat: The chat.

    Returns:
        The ids, as transformers gives them. A token with some characters of an answer is part of
        it.
    """
    ids, begins, ends = tokenizer.encode_controls(chat.text)
    answers = list(chat.answers)
    at = 0
    is_answer = []
    for begin, end in zip(begins, ends, strict=True):
        while at < len(answers) and answers[at][1] <= begin:
            at += 1
        is_answer.append(at < len(answers) and begin < answers[at][1] and end > answers[at][0])
    return EncodedChat(ids, is_answer)


def load_chat_template(
    folder: Path, tokenizer: TextTokenizer, template: Path | None = None
) -> ChatTemplate:
    """Load the chat template of a tokenizer.

    Args:
        folder: Folder of the tokenizer.
        tokenizer: The tokenizer, which names its special tokens.
        template: A Jinja file to use instead of its own.

    Returns:
        The template.

    Raises:
        DataError: There is none, or it cannot be read.
    """
    special = {f"{role}_token": piece for role, piece in tokenizer.special.items()}
    file = template or folder / TEMPLATE_NAME
    if template is None and not file.is_file():
        source = _select_default(read_json_object(folder / CONFIG_NAME).get("chat_template"))
        if source is None:
            raise DataError(
                f"{folder} has no chat template: neither {TEMPLATE_NAME} nor chat_template in "
                f"{CONFIG_NAME}. Set data.template to a Jinja file, or use the tokenizer of a "
                "model that was tuned on chats."
            )
        return ChatTemplate(source, special, f"chat_template of {folder / CONFIG_NAME}")
    try:
        return ChatTemplate(file.read_text("utf-8"), special, str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read as a chat template ({error}). Correct the path."
        ) from None


def _select_default(value: object) -> str | None:
    """Return a template, or of several named ones that of the name `default`."""
    if isinstance(value, list):
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _build_environment() -> "Environment":
    """Return transformers' environment, without its clock."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.utils import Namespace

    from llmsys.vocabulary.template_limits import LimitedEnvironment

    class AnswerMarks(Extension):
        """The tag `{% generation %}`, whose text gets marks."""

        tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Macro) -> str:
            return f"{BEGIN}{caller()}{END}"

    class GuardedNamespace(Namespace):
        """A namespace without attributes of CPython's internals."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"{name} begins with an underscore. Rename the attribute.")
            super().__setitem__(name, value)

    def build_dict(*values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[AnswerMarks, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "namespace": GuardedNamespace,
        "dict": build_dict,
    }
    environment.limit_filters()
    return environment
