"""Which documents were in which step, both ways, against reading every batch; steps made again
and compared.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml

from llmsys.config.loading.load import load_run_config
from llmsys.data.batch import Batch, compute_batch_digest
from llmsys.data.dataset_mixture import MixtureOrder
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.doctor.document_trace import DocumentLocation, DocumentTracer, read_progress
from llmsys.errors import DataError
from llmsys.launch.main import main
from tests.helpers.command_line import run_llmsys
from tests.helpers.dataset import VOCABULARY, build_toy_url, make_dataset
from tests.helpers.forked_commands import run_forked

STEPS = 6


def write_dataset_with_urls(folder: Path) -> Path:
    """The toy dataset, with the documents that a preparation would leave beside the tokens."""
    make_dataset(folder)
    numbers = range(120)
    columns = {
        "id": [f"{n:032x}" for n in numbers],
        "url": [build_toy_url("train", n) for n in numbers],
    }
    documents = pa.record_batch(columns)
    (folder / "documents").mkdir()
    with ArrowFileWriter(
        folder / "documents" / "documents-00000.arrow", documents.schema
    ) as writer:
        writer.write(documents)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes with a ramp, in fp32, that ended."""
    folder = tmp_path_factory.mktemp("traced")
    settings = {
        "run": {"folder": str(folder / "run")},
        "data": {"folder": str(write_dataset_with_urls(folder / "toy"))},
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64,
        },
        "batch": {"sequence_length": 32, "sequences": 8, "ramp": {"start_tokens": 128,
            "ramp_tokens": 600}},
        "train": {"tokens": 1280, "log_every_steps": 1, "precision": "fp32",
            "threads_per_process": 1},
        "launch": {"processes": 2},
        "checkpoint": {"every_steps": 2, "keep_last": 9},
    }  # fmt: skip
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(settings))
    run_forked("train", path)
    return path


def test_a_document_is_traced_to_exactly_the_steps_that_list_it(run: Path) -> None:
    config = load_run_config(str(run))
    tracer = DocumentTracer(config)
    done = config.num_steps
    listed: dict[str, list[int]] = {}
    for step in range(1, done + 1):
        for entry in tracer.list_step_documents(step):
            listed.setdefault(entry["id"], []).append(step)
            assert entry["url"].startswith("http")
            assert entry["offset"] >= 0
    shards = tracer.dataset.sources[0]
    for number in range(shards.num_documents):
        name = str(shards.get_lineage(number)["id"])
        assert tracer.list_steps_with_document(DocumentLocation(0, number), done) == listed.get(
            name, []
        ), name
        assert DocumentLocation(0, number) in tracer.locate_document(document=name)


def test_steps_list_the_documents_whose_tokens_they_have(run: Path) -> None:
    config = load_run_config(str(run))
    tracer = DocumentTracer(config)
    shards = tracer.dataset.sources[0]
    known = {
        str(shards.get_lineage(n)["id"]): shards.get_tokens(n).tolist()
        for n in range(shards.num_documents)
    }
    for step in (1, config.num_steps):
        rows = [
            row
            for batch in tracer.steps.get_micro_batches(step - 1)
            for row in batch.tokens_BT.tolist()
        ]
        stream = {token for row in rows for token in row}
        named = [known[entry["id"]] for entry in tracer.list_step_documents(step)]
        assert stream <= {token for tokens in named for token in tokens}
        assert sum(map(len, named)) >= len(rows) * config.batch.sequence_length


def test_the_verb_answers_both_questions(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "step=3", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["documents"][0]
    assert main(["trace", str(run), f"url={first['url']}", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert 3 in answer["steps"]
    earliest = min(answer["steps"])
    assert answer["checkpoints"]
    assert all(int(name.removeprefix("step-")) >= earliest for name in answer["checkpoints"])
    assert main(["trace", str(run), f"document={first['id']}"]) == 0
    assert "steps trained on it" in capsys.readouterr().out


def test_a_document_without_url_is_not_called_gone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run.parent / "toy" / "documents" / "documents-00000.arrow"
    before = path.read_bytes()
    ids = [
        entry["id"] for entry in DocumentTracer(load_run_config(str(run))).list_step_documents(3)
    ]
    # pairs have no such column
    columns = ({"id": ids[1:], "url": [""] * (len(ids) - 1)}, {"id": ids[1:]})
    try:
        for values in columns:
            batch = pa.record_batch(values)
            with ArrowFileWriter(path, batch.schema) as writer:
                writer.write(batch)
            assert main(["trace", str(run), "step=3"]) == 0
            first, *others = capsys.readouterr().out.splitlines()[1:]
            assert first.endswith("(its text no longer exists)")
            assert others
            assert all(line.endswith("(it has no URL)") for line in others)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give exactly one of step=N, url=URL, document=ID or --worst N."),
        (["step=x"], "step=x is not a step"),
        (["step=999"], "step=999 is not a step of this run, which has"),
        (["url=http://nowhere/"], "http://nowhere/ is not in the training shards"),
    ],
)
def test_a_question_without_an_answer_says_why(run: Path, words, message, capsys) -> None:
    assert main(["trace", str(run), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("step", [1, 4])
def test_a_step_is_made_again_from_the_seed_or_a_checkpoint(run: Path, step: int) -> None:
    answer = json.loads(run_forked("replay", run, f"step={step}", "--json").stdout)
    assert answer["agrees"], answer
    assert {check["what"] for check in answer["checks"]} == {"tokens", "loss", "gradient_norm"}


def test_a_record_that_does_not_fit_is_found(run: Path, tmp_path: Path) -> None:
    """A planted lie in the record, and the same data with another seed."""
    other = run_forked("replay", run, "step=2", "run.seed=1", "--json", check=False)
    assert other.returncode == 1
    wrong = {check["what"] for check in json.loads(other.stdout)["checks"] if not check["agrees"]}
    assert "tokens" in wrong
    done = run_llmsys("replay", run, "step=999", check=False)
    assert done.returncode == 2
    assert "step=999 was not trained" in done.stderr


def build_batch(rows: list[list[int]]) -> Batch:
    tokens = torch.tensor(rows)
    return Batch(tokens, tokens + 1)


def test_the_digest_knows_rows_but_not_who_held_them() -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 4]]
    whole = compute_batch_digest([build_batch(rows)])
    parts = compute_batch_digest([build_batch(rows[2:])]) + compute_batch_digest(
        [build_batch(rows[:1]), build_batch(rows[1:2])]
    )
    assert (whole - parts) % 2**64 == 0
    assert whole != compute_batch_digest([build_batch([[2, 1, 3], *rows[1:]])]), "places count"
    assert whole != compute_batch_digest([build_batch([*rows, rows[0]])]), "so does how often"


def test_numbers_of_a_mixture_are_the_inverse_of_locate() -> None:
    order = MixtureOrder([(0, (3, 1)), (10, (1, 1)), (31, (0, 5))])
    numbers = np.arange(60)
    sources, local = order.locate_sequences(numbers)
    for source in (0, 1):
        here = sources == source
        assert order.get_global_numbers(source, local[here]).tolist() == numbers[here].tolist()


def test_a_run_that_never_began_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run was trained there"):
        read_progress(tmp_path)
