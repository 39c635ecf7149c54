"""Laws of secrets: every kind of them is taken out of text, and what only looks like one stays."""

import io
import logging
from pathlib import Path

import pytest

from llmsys.errors import DataError
from llmsys.events import EventWriter, read_events
from llmsys.log import (
    configure_logging,
    get_logger,
    has_secret,
    is_secret_name,
    redact_secrets,
    redact_values,
)

SECRET_TEXTS = {
    "https://user:hush@host/a.warc.gz": "https://REDACTED@host/a.warc.gz",
    "https://hush@github.com/x": "https://REDACTED@github.com/x",
    "ftp://me:p@hush@host/x": "ftp://REDACTED@host/x",
    "simplecache::https://me:hush@host/x": "simplecache::https://REDACTED@host/x",
    "https://b.s3.amazonaws.com/x?X-Amz-Date=1&X-Amz-Credential=hush&X-Amz-Signature=hush&part=2": (
        "https://b.s3.amazonaws.com/x?X-Amz-Date=1&X-Amz-Credential=REDACTED&X-Amz-Signature=REDACTED&part=2"
    ),
    "https://h/x?sv=2020&sig=hush%3D#access_token=hush": "https://h/x?sv=2020&sig=REDACTED#access_token=REDACTED",
    "https://h/x?accessToken=hush&apiKey=hush": "https://h/x?accessToken=REDACTED&apiKey=REDACTED",
    "https://h/?to=https://me:hush@k/x": "https://h/?to=https://REDACTED@k/x",
    "cannot read 'https://me:hush@h/x', 403": "cannot read 'https://REDACTED@h/x', 403",
    "--export=ALL,HF_TOKEN=hush,X=1": "--export=ALL,HF_TOKEN=REDACTED,X=1",
    "GH_PAT='hush hush' MY_AUTH=hush": "GH_PAT=REDACTED MY_AUTH=REDACTED",
    "Bearer hf_" + "a1" * 15: "Bearer REDACTED",
    "AKIA" + "ABCDEFGH12345678": "REDACTED",
}


@pytest.mark.parametrize(("text", "expected"), SECRET_TEXTS.items())
def test_secrets_are_taken_out_and_twice_is_once(text: str, expected: str) -> None:
    assert redact_secrets(text) == expected
    assert redact_secrets(expected) == expected
    assert has_secret(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/key/a.warc.gz",
        "abfs://container@account.dfs.core.windows.net/a",
        "ssh://git@host/x",
        "https://h/x?author=me&page=2&keyword=a",
        "MAX_TOKENS=512 TOKENIZERS_PARALLELISM=false PATH=/usr/bin PYTHONPATH=/a",
        "train.tokens=1000 data.folder=keys/x",
        "mail me@example.org: see https://h/a@b",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_secrets(text) == text


def test_names_are_secret_by_their_parts() -> None:
    secret = (
        "GH_PAT HF_TOKEN MY_AUTH SSH_PASSPHRASE AWS_CREDENTIALS WANDB_API_KEY SIGNING_KEY DB_PWD "
        "NPM_PASS lower_token"
    )
    plain = (
        "PATH PYTHONPATH HF_HOME NCCL_DEBUG WANDB_PROJECT OMP_NUM_THREADS TORCH_COMPASS KEYBOARD"
    )
    assert [name for name in secret.split() if not is_secret_name(name)] == []
    assert [name for name in plain.split() if is_secret_name(name)] == []


def test_plain_data_keeps_its_form() -> None:
    value = {
        "inputs": ["https://u:hush@h/x", 3],
        "none": None,
        "deep": {"a": ("HF_TOKEN=hush", 1.5)},
    }
    expected = {
        "inputs": ["https://REDACTED@h/x", 3],
        "none": None,
        "deep": {"a": ["HF_TOKEN=REDACTED", 1.5]},
    }
    assert redact_values(value) == expected


def test_no_secret_reaches_events_log_lines_or_messages(tmp_path: Path) -> None:
    url = "https://me:hush@host/x?sig=hush"
    with EventWriter(tmp_path / "events.jsonl") as events:
        events.write("note", reason=f"cannot read {url}", nested={"a": [url]})
    stream = io.StringIO()
    before = logging.getLogger().handlers[:]
    try:
        configure_logging(stream=stream)
        get_logger("llmsys.x").warning("trying %s again", url)
    finally:
        logging.getLogger().handlers[:] = before
    error = DataError(f"{url} is gone")
    written = (tmp_path / "events.jsonl").read_text() + stream.getvalue() + str(error)
    assert "hush" not in written
    assert written.count("https://REDACTED@host/x?sig=REDACTED") == 4
    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["note"]
