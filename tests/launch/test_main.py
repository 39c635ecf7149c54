"""The `llmsys` command: one grammar, help that starts at once, and one message for what a person
can mend.
"""

import errno
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import llmsys.launch.main
import llmsys.launch.train
from llmsys.launch.commands.verbs import VERBS
from llmsys.launch.main import build_parser, format_help, main
from tests.helpers.paths import ROOT

HEAVY = ("torch", "pydantic", "numpy", "pyarrow", "yaml")
NEED_CONFIGS = ("scale",)


def imported_by(*commands: tuple[str, ...]) -> set[str]:
    """Top-level modules that a fresh process has imported after running `llmsys` with each of
    these arguments.
    """
    code = (
        "import contextlib, sys, llmsys.launch.main\n"
        f"for words in {commands!r}:\n"
        "    with contextlib.suppress(SystemExit): llmsys.launch.main.main(list(words))\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in result.stderr.split()}


def test_help_imports_nothing_heavy() -> None:
    assert not imported_by(("--help",)) & set(HEAVY)


def test_help_of_the_verbs_imports_no_torch_arrays_or_tables() -> None:
    """The help of scale lists the keys of its config, which is of pydantic."""
    light = [(name, "--help") for name in VERBS if name not in NEED_CONFIGS]
    assert not imported_by(*light) & set(HEAVY)
    assert not imported_by(*((name, "--help") for name in NEED_CONFIGS)) & {
        "torch",
        "numpy",
        "pyarrow",
    }


@pytest.mark.parametrize(
    "arguments", [("estimate", "train/demo"), ("show", "train/demo")], ids=" ".join
)
def test_what_needs_no_tensors_imports_no_torch(arguments: tuple[str, ...]) -> None:
    assert not imported_by(arguments) & {"torch", "deepspeed", "accelerate", "transformers"}


def test_help_names_every_verb_with_what_it_does() -> None:
    for name, verb in VERBS.items():
        assert re.search(
            rf"^  {name} +{re.escape(verb.summary)}$", format_help(), flags=re.MULTILINE
        )


@pytest.mark.parametrize("name", VERBS)
def test_help_of_a_verb_has_a_working_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"example: {VERBS[name].example}\n" in capsys.readouterr().out
    program, verb, *words = shlex.split(VERBS[name].example)
    assert (program, verb) == ("llmsys", name)
    arguments = build_parser(name).parse_intermixed_args(words)
    if VERBS[name].takes_config:
        own = getattr(importlib.import_module(f"llmsys.launch.commands.{name}"), "OWN_NAMES", ())
        overrides = [word for word in arguments.overrides if word.partition("=")[0] not in own]
        assert main(["show", arguments.config, *overrides, "--json"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["train/demo", "run.seed=3", "--json"],
        ["--json", "train/demo", "run.seed=3"],
        ["train/demo", "--json", "run.seed=3"],
    ],
    ids=" ".join,
)
def test_options_may_stand_anywhere(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *words]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["run"]["seed"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["shwo", "train/demo"],
            "llmsys: error: 'shwo' is not a verb. Did you mean show? See: llmsys --help\n",
        ),
        (
            ["show"],
            "llmsys: error: No config was given. Give a CONFIG such as train/demo, or --schema.\n",
        ),
        (
            ["show", "train/demo", "seed"],
            "llmsys: error: 'seed' is not section.key=value. Write, say, batch.",
        ),
        (["train", "nowhere"], "llmsys: error: config 'nowhere' was not found"),
        (
            ["train", "model/demo-moe"],
            "model/demo-moe.yaml is a bare model, but a run config is needed.",
        ),
        (
            ["estimate", "train/demo", "layout.expert=16"],
            "8 experts cannot be split over expert=16. Use expert=1, 2, 4 or 8",
        ),
        (
            ["report", "train/demo", "run.folder=no/run", "data.folder=no/data"],
            "neither run.folder no/run nor",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_message_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "kind", "status"),
    [
        (["shwo", "train/demo"], "ConfigError", 2),
        (["show", "train/demo", "seed"], "ConfigError", 2),
        (["show", "train/demo", "--jsn"], "ConfigError", 2),
        (["estimate", "train/demo", "layout.expert=16"], "ConfigError", 2),
        (["inspect", "nowhere"], "DataError", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_with_json_a_mistake_is_one_object(
    words: list[str], kind: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--json"]) == status
    captured = capsys.readouterr()
    [(name, error)] = json.loads(captured.out).items()
    assert (name, error.keys()) == ("error", {"kind", "message", "status"})
    assert (error["kind"], error["status"]) == (kind, status)
    assert captured.err == f"llmsys: error: {error['message']}\n"


def test_with_json_ranks_that_failed_are_one_object_with_their_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object, words: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("llmsys.launch.launchers.local.run_local_ranks", fail)
    with pytest.raises(SystemExit):
        main(["train", "train/demo", f"run.folder={tmp_path}", "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["status"] == 3


def test_no_verb_at_all_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out == format_help()


def test_interrupting_ends_with_status_130_and_tells_how_to_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(llmsys.launch.main, "_run_command", interrupted)
    assert main(["chat", "my.yaml"]) == 130
    assert capsys.readouterr().err == ""  # this is how one leaves it
    assert main(["convert", "from", "to"]) == 130
    assert (
        capsys.readouterr().err
        == "llmsys: interrupted. Start it again with: llmsys convert from to\n"
    )
    assert main(["prepare", "my.yaml", "data.inputs=[a b]"]) == 130
    expected = "the same command continues: llmsys prepare my.yaml 'data.inputs=[a b]'"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("entry", [llmsys.launch.main.main, llmsys.launch.train.main])
def test_a_full_disk_is_one_message_and_status_2(
    entry: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x/events.jsonl")

    monkeypatch.setattr(llmsys.launch.main, "_run_command", full)
    monkeypatch.setattr(llmsys.launch.train, "load_run_config", full)
    assert entry(["show", "train/demo"]) == 2
    said = capsys.readouterr().err
    assert (
        "llmsys: error: runs/x/events.jsonl could not be read or written: No space left on "
        "device. Free"
    ) in said
    assert said.count("\n") == 1


def test_a_removed_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["show", "train/demo"]) == 2
    assert (
        "the working directory was removed. Change to a folder that exists"
        in capsys.readouterr().err
    )


def test_an_error_of_the_system_that_nobody_can_mend_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strange(*_: object) -> int:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(llmsys.launch.main, "_run_command", strange)
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["show", "train/demo"])


def test_what_every_rank_has_met_is_said_by_rank_0_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert llmsys.launch.train.main(["nowhere"]) == 2
    assert waited == [llmsys.launch.train.CAUSE_FIRST_SECONDS]


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = (
        f"{shlex.quote(sys.executable)} -m llmsys.launch.main show --schema | head -1; echo "
        "${PIPESTATUS[0]}"
    )
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.splitlines()[-1] in ("0", "141")
    assert result.stderr == ""


def test_the_command_ends_with_the_process_that_asked_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    environment = {**os.environ, "LLMSYS_PARENT": gone.stdout.strip()}
    command = [sys.executable, "-m", "llmsys.launch.main", "show", "train/demo"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")


def test_the_tool_is_the_same_door(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "tools/estimate.py", "model/demo-moe", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert main(["estimate", "model/demo-moe", "--json"]) == 0
    assert json.loads(result.stdout) == json.loads(capsys.readouterr().out)


def test_prepare_says_what_it_could_not_read_and_where() -> None:
    from llmsys.dataset.manifest import Manifest, ReadSummary, SkippedInput
    from llmsys.launch.commands.prepare import format_skipped

    skips = (
        SkippedInput(file="a.warc.gz", offset=6030, reason="truncated", count=1),
        SkippedInput(file="b.warc.gz", offset=0, reason="empty file", count=1),
        SkippedInput(file="c.warc.gz", offset=7, reason="truncated", count=2),
    )
    manifest = Manifest.model_construct(
        read=ReadSummary(files=3, records=10, html_bytes=5, skipped=skips)
    )  # type: ignore[call-arg]
    assert format_skipped(manifest) == [
        "skipped 1: empty file (first: b.warc.gz at byte 0)",
        "skipped 3: truncated (first: a.warc.gz at byte 6,030)",
    ]
