"""A model with its tokenizer, as a server on this machine uses it: one text at a time.

Invariants:
- One text is generated at a time.
- Probabilities are those of the model, before temperature and filters.
"""

import threading
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.config.train import GenerationConfig
from llmsys.errors import ConfigError
from llmsys.generate.chat_format import load_chat_format
from llmsys.generate.prompt_completion import TextStreamer, build_decoding_params
from llmsys.generate.text_generation import encode_prompt, generate_texts
from llmsys.model.transformer import Transformer
from llmsys.train.run_data import get_prefix_ids
from llmsys.vocabulary.tokenizer import Tokenizer

ALTERNATIVES = 6
CONTROLS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "seed",
)

Send = Callable[[dict[str, Any]], None]
# Receives the text of a token, the logits (V,) that it was chosen from, and its id.
OnPiece = Callable[[str, Tensor, int], None]


class ChatModel:
    """A model, its tokenizer and the settings that a page starts with."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: RunConfig) -> None:
        """Load the chat template of the run.

        Args:
            model: The model, with its weights, on its device.
            tokenizer: Its tokenizer.
            config: Config of the run; its `generation:` section has the settings that a page starts
                with.

        Raises:
            ConfigError: generation.format=chat, and there is no template.
            DataError: The template cannot be used.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.chats = load_chat_format(config)
        self._lock = threading.Lock()

    def continue_text(self, request: dict[str, Any], send: Send) -> None:
        """Generate a continuation and send {text, probability, top} for each token, then {end}.

        Args:
            request: `text`, and values of `CONTROLS`; of a model that was tuned on chats `messages`
                instead of `text`.
            send: receives each message; an error in it ends the text.

        Raises:
            ConfigError: a setting is out of range.
            DataError: the text fills the context.
        """
        settings = build_generation_settings(self.config.generation, request)
        prompt = str(request.get("text", ""))
        ids = (
            self.encode_prompt(prompt, settings)
            if self.chats is None
            else self.encode_messages(read_messages(request))
        )

        def send_token(piece: str, logits_V: Tensor, token: int) -> None:
            send({"text": piece} | describe_choice(self.tokenizer, logits_V, token))

        send({"end": self.generate_text(prompt, ids, settings, send_token)})

    def encode_prompt(self, prompt: str, settings: GenerationConfig) -> list[int]:
        """Encode a text to continue.

        Args:
            prompt: The text.
            settings: The settings, whose `prefix_pieces` come before it.

        Returns:
            Its ids; of an empty text without a prefix the id that a text begins with.
        """
        return encode_prompt(self.tokenizer, prompt, get_prefix_ids(settings, self.tokenizer))

    def encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """Encode the messages of a chat, up to the next answer.

        Args:
            messages: Messages with `role` and `content`.

        Returns:
            Their ids.

        Raises:
            DataError: The chat template rejects them.
        """
        assert self.chats is not None, "only a model that was tuned on chats has a template"
        with self._lock:  # the tokenizer takes control tokens as such meanwhile
            return self.chats.encode_messages(messages)

    def generate_text(
        self, prompt: str, ids: list[int], settings: GenerationConfig, on_piece: OnPiece
    ) -> str:
        """Generate one text.

        Args:
            prompt: The text to continue, which seeds the sampling.
            ids: Its tokens with those before it.
            settings: How to sample.
            on_piece: Receives each token as soon as it is chosen, with the text that is certain by
                it; an error in it ends the text.

        Returns:
            The end of the text that was held back, because the bytes of a character were not
            complete.

        Raises:
            DataError: The prompt fills the context.
        """
        pieces: list[str] = []
        stream = TextStreamer(self.tokenizer, [prompt], lambda _, text: pieces.append(text), [ids])

        def send_token(_: int, logits_V: Tensor, token: int) -> None:
            pieces.clear()
            stream(0, token)
            on_piece("".join(pieces), logits_V, token)

        with self._lock:
            (text,) = generate_texts(
                self.model,
                self.tokenizer,
                [prompt],
                max_new_tokens=settings.max_new_tokens,
                decoding=build_decoding_params(settings),
                seed=settings.seed,
                prompt_ids=[ids],
                stop_ids=() if self.chats is None else self.chats.stop_ids,
                on_logits=send_token,
            )
        pieces.clear()
        stream.flush([text])
        return "".join(pieces)


def read_messages(request: dict[str, Any]) -> list[dict[str, str]]:
    """Read the messages of a request.

    Args:
        request: The JSON object of the request: `messages`, or `text` as one message of the
            user.

    Returns:
        Messages with `role` and `content`.

    Raises:
        ConfigError: There are none.
    """
    messages = request.get("messages", [{"role": "user", "content": str(request.get("text", ""))}])
    if (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(one, dict)
            and isinstance(one.get("role"), str)
            and isinstance(one.get("content"), str)
            for one in messages
        )
    ):
        return messages
    raise ConfigError("messages is no list of {role, content}. Send one or more, or `text`.")


def build_generation_settings(
    defaults: GenerationConfig, request: dict[str, Any]
) -> GenerationConfig:
    """Build the settings of one answer.

    Args:
        defaults: The settings of the run.
        request: The JSON object of the request; values of `CONTROLS` replace the defaults.

    Returns:
        The settings.

    Raises:
        ConfigError: A value is out of range. The message names it.
    """
    given = {name: request[name] for name in CONTROLS if request.get(name) is not None}
    try:
        # beams have no single next token to show
        return GenerationConfig.model_validate(defaults.model_dump() | given | {"num_beams": 1})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{name}={first['input']!r}: {first['msg'].lower()}. Correct it, or empty the field."
        ) from None


def describe_choice(tokenizer: Tokenizer, logits_V: Tensor, token: int) -> dict[str, Any]:
    """Return the probability of a token and the most likely ones.

    Args:
        tokenizer: names the tokens.
        logits_V: the model's logits.
        token: the chosen token.

    Returns:
        `probability`, and `top`: [text, probability] of the `ALTERNATIVES` most likely tokens.
    """
    probability_V = logits_V.float().softmax(-1)
    values, ids = probability_V.topk(min(ALTERNATIVES, len(probability_V)))
    top = [
        [tokenizer.decode([number]), round(value, 5)]
        for value, number in zip(values.tolist(), ids.tolist(), strict=True)
    ]
    return {"probability": round(float(probability_V[token]), 5), "top": top}
