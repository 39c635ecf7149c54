"""Complete the prompts of a config: at the end of a run, and for `llmsys generate`."""

from collections.abc import Callable

from llmsys.config.run import RunConfig
from llmsys.config.train import GenerationConfig
from llmsys.generate.chat_format import load_chat_format
from llmsys.generate.text_generation import BeamSearchParams, generate_texts
from llmsys.generate.token_sampling import SamplingParams
from llmsys.model.transformer import Transformer
from llmsys.train.run_data import get_prefix_ids
from llmsys.vocabulary.tokenizer import Tokenizer

# Receives (prompt index, piece of text) as soon as the text is certain.
OnText = Callable[[int, str], None]


def complete_prompts(
    model: Transformer, tokenizer: Tokenizer, config: RunConfig, on_text: OnText | None = None
) -> list[dict[str, str]]:
    """Complete each of `generation.prompts`; of a model that was tuned on chats, answer it.

    Args:
        model: a decoder.
        tokenizer: its tokenizer.
        config: the config of the run.
        on_text: receives pieces of text while they are generated.

    Returns:
        {prompt, text} for each prompt, in order.

    Raises:
        ConfigError: a setting of `generation` is out of range.
        DataError: a prompt fills the context.
    """
    settings = config.generation
    if not settings.prompts:
        return []
    chats = load_chat_format(config)
    ids = None if chats is None else [chats.encode_question(prompt) for prompt in settings.prompts]
    stream = (
        None if on_text is None else TextStreamer(tokenizer, list(settings.prompts), on_text, ids)
    )
    texts = generate_texts(
        model,
        tokenizer,
        list(settings.prompts),
        max_new_tokens=settings.max_new_tokens,
        decoding=build_decoding_params(settings),
        seed=settings.seed,
        prefix_ids=get_prefix_ids(settings, tokenizer),
        prompt_ids=ids,
        stop_ids=() if chats is None else chats.stop_ids,
        on_token=stream,
    )
    if stream is not None:
        stream.flush(texts)
    return [
        {"prompt": prompt, "text": text}
        for prompt, text in zip(settings.prompts, texts, strict=True)
    ]


def build_decoding_params(settings: GenerationConfig) -> SamplingParams | BeamSearchParams:
    """Choose how prompts are completed.

    Args:
        settings: The section `generation`.

    Returns:
        Beam search for more than one beam, else sampling.
    """
    if settings.num_beams > 1:
        return BeamSearchParams(settings.num_beams, settings.length_penalty)
    return SamplingParams(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
    )


class TextStreamer:
    """A converter of tokens to pieces of text. A character whose bytes are incomplete is held
    back.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: list[str],
        on_text: OnText,
        ids: list[list[int]] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._ids = (
            [tokenizer.encode(prompt) for prompt in prompts]
            if ids is None
            else [list(row) for row in ids]
        )
        self._decoded = [tokenizer.decode(ids) for ids in self._ids]
        self._emitted = ["" for _ in prompts]

    def __call__(self, row: int, token: int) -> None:
        """Add one token of one text, and emit the characters that it completes.

        Args:
            row: Index of the prompt.
            token: Id of the token.
        """
        self._ids[row].append(token)
        text = self._tokenizer.decode(self._ids[row])
        # The replacement character: the bytes of the last character are incomplete.
        if text.endswith("�") or not text.startswith(self._decoded[row]):
            return
        self._emit_text(row, text[len(self._decoded[row]) :])
        self._decoded[row] = text

    def flush(self, texts: list[str]) -> None:
        """Emit the text that was held back until the end.

        Args:
            texts: The whole completion of each prompt. Of a text that does not begin with what was
                emitted, nothing more is.
        """
        for row, text in enumerate(texts):
            if text.startswith(self._emitted[row]):
                self._emit_text(row, text[len(self._emitted[row]) :])

    def _emit_text(self, row: int, piece: str) -> None:
        if piece:
            self._emitted[row] += piece
            self._on_text(row, piece)
