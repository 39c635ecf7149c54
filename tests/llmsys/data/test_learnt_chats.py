"""The targets of chats in training and in evaluation are those of a rendering by hand."""

from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from llmsys.config.run import RunConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.heldout_chats import HeldoutChats
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import open_tokens
from llmsys.train.build_objective import build_step_batches
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.data_pipeline.chats.test_chats import build_config, write_inputs
from tests.helpers.chats import PLAIN_TEMPLATES, build_chats
from tests.reference import chats as reference
from tests.reference.chats import LearntChat, build_learnt_chat, render_chatml

ROWS = build_chats(60)


@pytest.fixture(scope="module", params=["with marks", "without marks"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("learnt")
    if request.param == "with marks":
        write_inputs(folder, ROWS)
    else:
        write_inputs(folder, ROWS, PLAIN_TEMPLATES["chatml"])
    config = build_config(folder)
    prepare_dataset(config)
    return config


@pytest.fixture(scope="module")
def expected(prepared: RunConfig) -> Counter[LearntChat]:
    tokenizer = Tokenizer.from_file(str(get_tokenizer_folder(prepared) / "tokenizer.json"))
    chats = [build_learnt_chat(tokenizer, render_chatml(row["messages"])) for row in ROWS]
    assert reference.IGNORED == IGNORED
    assert all(
        0 < sum(target != IGNORED for target in chat.targets) < len(chat.targets) / 2
        for chat in chats
    )
    return Counter(chats)


def get_tokenizer_folder(config: RunConfig) -> Path:
    return config.data.folder / "tokenizer"


def split_documents(batch: Batch) -> list[LearntChat]:
    """Inputs and targets of the documents of a batch, in their order; padding is in none."""
    assert batch.documents_BT is not None
    found = []
    for tokens_T, targets_T, documents_T in zip(
        batch.tokens_BT, batch.targets_BT, batch.documents_BT, strict=True
    ):
        for document in documents_T[documents_T >= 0].unique().tolist():
            places = documents_T == document
            found.append(
                LearntChat(tuple(tokens_T[places].tolist()), tuple(targets_T[places].tolist()))
            )
    return found


def test_training_learns_the_answers_of_whole_chats_and_nothing_else(
    prepared: RunConfig, expected: Counter[LearntChat]
) -> None:
    steps = build_step_batches(prepared, 1, 0)
    found: Counter[LearntChat] = Counter()
    for step in range(3):
        for batch in steps.get_micro_batches(step):
            found.update(split_documents(batch))
    chats = {
        chat: count
        for chat, count in found.items()
        if any(target != IGNORED for target in chat.targets)
    }
    # Longer chats than a window do not exist, and the few that best fit cuts begin as they should.
    whole = [chat for chat in chats if chat in expected]
    assert len(whole) > 0.8 * len(chats)
    for chat in chats.keys() - set(whole):
        size = len(chat.inputs)
        assert any(
            one.inputs[:size] == chat.inputs and one.targets[: size - 1] == chat.targets[:-1]
            for one in expected
        )
    # What is no chat is the border before one, alone.
    assert all(len(chat.inputs) == 1 for chat in found.keys() - chats.keys())


def test_evaluation_scores_the_answers_of_heldout_chats_after_what_is_before_them(
    prepared: RunConfig, expected: Counter[LearntChat]
) -> None:
    tokenizer = load_tokenizer(get_tokenizer_folder(prepared))
    heldout = HeldoutChats(open_tokens(prepared.data.folder, "heldout"), tokenizer, length=256)
    found = split_documents(heldout.get_batch(0, heldout.num_rows))
    # A row ends with the last target: its last token is no input.
    shortened = {LearntChat(chat.inputs[:-1], chat.targets[:-1]) for chat in expected}
    assert len(found) == heldout.num_rows > 5
    assert set(found) <= shortened
    assert heldout.tokens == sum(target != IGNORED for chat in found for target in chat.targets)
    limit = max(len(chat.inputs) for chat in shortened) // 2
    limited = HeldoutChats(open_tokens(prepared.data.folder, "heldout"), tokenizer, length=limit)
    cut = {LearntChat(chat.inputs[:limit], chat.targets[:limit]) for chat in shortened}
    assert set(split_documents(limited.get_batch(0, limited.num_rows))) <= cut
    assert max(len(row.ids) for row in limited.rows) == limit + 1
