"""Requests of the evaluation harness as rows: the cuts and lengths of its backend for
transformers (lm_eval 0.4).
"""

from collections.abc import Iterator, Sequence

from llmsys.data.multiple_choice import ChoiceRow
from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import TextTokenizer


class HarnessTokenizer:
    """A tokenizer with the rules of the harness about the tokens around a text.

    Args:
        tokenizer: The tokenizer.
        prefix_token: Id before a text without a context.
    """

    def __init__(self, tokenizer: TextTokenizer, prefix_token: int) -> None:
        self.tokenizer = tokenizer
        self.prefix_token = prefix_token
        controls = tokenizer.get_control_pieces()
        self._opening = [controls[piece] for piece in getattr(tokenizer, "opening", ())]
        self._prefix_text = next(
            (piece for piece, token in controls.items() if token == prefix_token), ""
        )

    def encode(self, text: str, opened: bool = True) -> list[int]:
        """Encode a text, in which control tokens may be spelled.

        Args:
            text: The text.
            opened: Begin with the ids that the tokenizer's file puts before a text, unless the text
                begins with the prefix token itself. Default: True.

        Returns:
            The ids.
        """
        ids = self.tokenizer.encode_controls(text).ids
        is_begun = bool(self._prefix_text) and text.startswith(self._prefix_text)
        return [*self._opening, *ids] if opened and not is_begun else ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a context and its continuation, the one after the other.

        Args:
            context: What is given. Spaces at its end belong to the continuation, as in the harness.
                "": the prefix token is the context.
            continuation: What is scored.

        Returns:
            The ids of the context, and those of the continuation.
        """
        if not context:
            ids = self.encode(continuation, opened=False)
            return (
                (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token] else ([self.prefix_token], ids)
            )
        stripped = context.rstrip()
        whole = self.encode(context + continuation)
        before = self.encode(stripped)
        return before, whole[len(before) :]


def build_continuation_row(
    number: int, context: list[int], continuation: list[int], longest: int
) -> ChoiceRow:
    """Return the row of a request, cut at the left to the model's context.

    Args:
        number: Number of the request.
        context: Ids before.
        continuation: Ids that are scored, at most `longest`.
        longest: The model's context in tokens.

    Returns:
        The row.

    Raises:
        DataError: Nothing is scored, or it does not fit the context.
    """
    tokens = [*context, *continuation][-(longest + 1) :]
    first = len(tokens) - len(continuation)
    if first < 1 or not continuation:
        raise DataError(
            f"evaluation.tasks: a request scores {len(continuation):,} tokens after "
            f"{len(context):,}, and the model's context has {longest:,} "
            "(model.max_position_embeddings). Leave the task out, or use a longer context."
        )
    return ChoiceRow(number, 0, tokens, first)


def iter_rolling_windows(
    ids: Sequence[int], prefix_token: int, longest: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Divide a text into windows such that every id is scored once.

    Args:
        ids: The text.
        prefix_token: Id before the first.
        longest: The model's context in tokens.

    Yields:
        Context and scored ids of each window.
    """
    if not ids:
        return
    yield [prefix_token], list(ids[:longest])
    for begin in range(longest, len(ids), longest):
        end = min(begin + longest, len(ids))
        # The last window is as long as the others: it has more context instead.
        yield list(ids[end - longest - 1 : begin]), list(ids[begin:end])
