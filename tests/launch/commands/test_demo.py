"""Laws of `llmsys demo`, with a stand-in for the `llmsys` command that records how it is called."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmsys.launch.commands.demo import SAMPLE_CRAWL, list_crawl_overrides
from llmsys.launch.main import main
from llmsys.launch.process.parent_watch import VARIABLE
from tests.helpers.process import PATIENCE_SECONDS, has_ended, wait_for_pid, wait_until

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path
from llmsys.launch.process.parent_watch import die_with_parent
die_with_parent()
folder, verb = Path(sys.argv[1]), sys.argv[2]
plan = json.loads((folder / "plan.json").read_text())
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(sys.argv[2:]) + "\\n")
if verb == plan.get("saves"):
    def save(number, frame):
        (folder / "saved").write_text(signal.Signals(number).name)
        sys.exit(75)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, save)
if verb in (plan.get("hangs"), plan.get("saves")):
    (folder / "pid").write_text(f"{os.getpid()}\\n")
    time.sleep(600)
if verb == plan.get("is_killed"):
    os.kill(os.getpid(), signal.SIGKILL)
if verb == plan.get("fails"):
    print("llmsys: error: the reason", file=sys.stderr)
    sys.exit(2)
if verb == "evaluate":
    assert sys.argv[-1] == "--json"
    print(json.dumps({"loss": 4.2, **plan["evaluation"]}))
"""
GOOD = {
    "bits_per_byte": 1.23449,
    "gzip_bits_per_byte": 2.3456,
    "xz_bits_per_byte": 2.1,
    "evaluated_bytes": 250_123,
}


class Stage:
    """A folder with the stand-in and the plan it follows."""

    def __init__(self, folder: Path, **plan: object) -> None:
        self.folder = folder
        (folder / "stand_in.py").write_text(STAND_IN)
        (folder / "plan.json").write_text(json.dumps({"evaluation": GOOD, **plan}))

    @property
    def arguments(self) -> list[str]:
        program = shlex.join([sys.executable, str(self.folder / "stand_in.py"), str(self.folder)])
        return ["demo", "--program", program, "--folder", "out", "--config", "train/demo"]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "llmsys.launch.main", *self.arguments]

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_every_verb_runs_once_in_order_on_the_same_config(engine: str, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert main([*stage.arguments, "--engine", engine]) == 0
    assert [call[0] for call in stage.calls()] == [
        "prepare",
        "estimate",
        "train",
        "evaluate",
        "generate",
        "report",
    ]
    overrides = [
        "train/demo",
        "data.folder=out/data",
        f"run.folder=out/{engine}",
        f"engine.kind={engine}",
    ]
    assert all(call[1:5] == overrides for call in stage.calls())


def test_the_last_line_is_the_yardstick(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(Stage(tmp_path).arguments) == 0
    output, errors = capfd.readouterr()
    assert (
        output.splitlines()[-1]
        == "bits_per_byte model=1.234 gzip=2.346 xz=2.100 heldout_bytes=250123"
    )
    assert errors == ""
    assert "[4/6] evaluate" in output
    assert "What to expect: 1.797 to 1.805 bits per byte for the model." in output
    assert "out/torch/report.html" in output


def test_overrides_and_the_sample_crawl_reach_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Outside of a checkout the config's relative path of the sample crawl names nothing."""
    stage = Stage(tmp_path)
    monkeypatch.chdir(tmp_path)
    [crawl] = list_crawl_overrides()
    assert [Path(shard).is_file() for shard in json.loads(crawl.removeprefix("data.inputs="))] == [
        True,
        True,
    ]
    assert main([*stage.arguments, "train.tokens=9_000"]) == 0
    assert "What to expect" not in capfd.readouterr().out  # of another run
    assert {tuple(call[5:7]) for call in stage.calls()} == {(crawl, "train.tokens=9_000")}
    (tmp_path / SAMPLE_CRAWL).mkdir(parents=True)
    assert list_crawl_overrides() == []


def test_json_is_the_evaluation_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*Stage(tmp_path).arguments, "--json"]) == 0
    output, errors = capfd.readouterr()
    assert json.loads(output) == {"loss": 4.2, **GOOD}
    assert "[4/6] evaluate" in errors


@pytest.mark.parametrize("better", ["gzip_bits_per_byte", "xz_bits_per_byte"])
def test_a_model_that_a_compressor_beats_fails_the_demo(
    better: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(Stage(tmp_path, evaluation={**GOOD, better: 1.2}).arguments) == 1
    output, errors = capfd.readouterr()
    assert errors == "demo: the model does not beat both compressors\n"
    assert output.splitlines()[-1].startswith("bits_per_byte model=1.234")


@pytest.mark.parametrize(
    ("plan", "status", "message"),
    [
        (
            {"fails": "train"},
            2,
            "demo: `llmsys train` ended with status 2; run the same command again to continue",
        ),
        (
            {"is_killed": "train"},
            137,
            "demo: `llmsys train` was killed by signal 9; run the same command again",
        ),
    ],
)
def test_a_verb_that_fails_stops_the_demo(
    plan: dict[str, str],
    status: int,
    message: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stage = Stage(tmp_path, **plan)
    assert main(stage.arguments) == status
    assert message in capfd.readouterr().err
    assert stage.calls()[-1][0] == "train"


def test_killing_the_demo_ends_the_verb_it_runs(tmp_path: Path) -> None:
    stage = Stage(tmp_path, hangs="train")
    with subprocess.Popen(stage.command) as demo:
        verb = wait_for_pid(tmp_path / "pid")
        demo.kill()
    wait_until(lambda: has_ended(verb), "the verb outlived the demo")


def test_killing_make_ends_the_demo_and_the_verb_it_runs(tmp_path: Path) -> None:
    stage = Stage(tmp_path, hangs="prepare")
    with subprocess.Popen(["sleep", "600"]) as make:
        environment = {**os.environ, VARIABLE: str(make.pid)}
        with subprocess.Popen(stage.command, env=environment) as demo:
            verb = wait_for_pid(tmp_path / "pid")
            make.kill()
            assert demo.wait(timeout=PATIENCE_SECONDS) == 1
    wait_until(lambda: has_ended(verb), "the verb outlived make")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_asked_to_stop_saves(number: signal.Signals, tmp_path: Path) -> None:
    stage = Stage(tmp_path, saves="train")
    with subprocess.Popen(stage.command, stderr=subprocess.PIPE, text=True) as demo:
        wait_for_pid(tmp_path / "pid")
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=PATIENCE_SECONDS)
    assert demo.returncode == 75
    assert (tmp_path / "saved").read_text() == number.name
    said = (
        "demo: `llmsys train` was stopped, and what it did is kept; run the same command again to "
        "continue where it stopped"
    )
    assert errors.splitlines() == [said]


@pytest.mark.skipif(shutil.which("make") is None, reason="apt-get install make is wanted")
def test_make_demo_hands_a_sigterm_on(tmp_path: Path, repository: Path) -> None:
    """What make starts is the demo itself and not a shell, which would end alone."""
    llmsys = tmp_path / "llmsys"
    llmsys.write_text(
        "#!/bin/sh\ntrap 'touch saved; exit 75' TERM\ntouch began\nwhile :; do sleep 0.05; done\n"
    )
    llmsys.chmod(0o755)
    words = ["make", "-f", str(repository / "Makefile"), "-o", "install", "demo", f"BIN={tmp_path}"]
    with subprocess.Popen(words, cwd=tmp_path) as make:
        wait_until((tmp_path / "began").exists, "the demo did not begin")
        make.terminate()
        make.wait(PATIENCE_SECONDS)
    assert (tmp_path / "saved").exists()
