"""Requests of the evaluation harness become rows as its backend for transformers makes them."""

from pathlib import Path

import pytest

from llmsys.data.harness_rows import HarnessTokenizer, build_continuation_row, iter_rolling_windows
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.json_tokenizers import write


@pytest.mark.parametrize("length", [0, 1, 5, 8, 9, 16, 21])
def test_rolling_windows_score_every_token_once_with_as_much_context_as_there_is(
    length: int,
) -> None:
    ids, longest = list(range(100, 100 + length)), 8
    windows = list(iter_rolling_windows(ids, 1, longest))
    assert [token for _, scored in windows for token in scored] == ids
    for number, (context, scored) in enumerate(windows):
        assert len(context) + len(scored) - 1 == (min(length, longest) if number == 0 else longest)
        first = ids.index(scored[0])
        assert context == ([1] if first == 0 else ids[first - len(context) : first])


def test_tokens_around_a_text_follow_the_harness(tmp_path: Path) -> None:
    write("llama3", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    begin = tokenizer.bos_id
    ours = HarnessTokenizer(tokenizer, begin)
    plain = tokenizer.encode("the dog")
    assert ours.encode("the dog") == [begin, *plain]
    assert ours.encode("<|begin_of_text|>the dog") == [begin, *plain]
    assert ours.encode_pair("", "the dog") == ([begin], plain)
    assert ours.encode_pair("the ", "dog") == (
        [begin, *tokenizer.encode("the")],
        tokenizer.encode(" dog"),
    )


def test_a_long_request_loses_the_begin_of_its_context() -> None:
    row = build_continuation_row(3, list(range(10)), [20, 21], longest=6)
    assert (row.tokens, row.first, row.question) == ([5, 6, 7, 8, 9, 20, 21], 5, 3)
