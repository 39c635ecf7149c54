"""Code that a config names runs with consent alone, in every verb; SECURITY.md says which verbs
run any.

A run with code in every section is prepared and trained once, with consent that is not recorded.
Each file of its code leaves a mark when it runs.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from llmsys.config.loading.python_block import load_python_block
from llmsys.config.loading.trusted_code import compute_file_digest, get_record_path
from llmsys.estimate.python_blocks import measure_block
from llmsys.launch.commands.verbs import VERBS
from llmsys.launch.main import main
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import make_crawl

TEMPLATES = ROOT / "launch" / "commands" / "templates"
CONFIG = """\
run: {folder: run}
model:
  base: model/demo-moe
  moe: null
  vocab_size: 257
  hidden_size: 16
  intermediate_size: 24
  num_hidden_layers: 1
  num_attention_heads: 2
  num_key_value_heads: 1
  attention: {kind: python, path: "own/mixer.py:LinearAttention"}
  feed_forward: {kind: python, path: "own/feed_forward.py:SquaredRelu"}
data:
  folder: data
  inputs:
    - path: "crawl/*"
  extract: {kind: python, path: "own/extractor.py:Paragraphs"}
  rules: [{kind: python, path: "own/rule.py:NoRecipes"}]
  executor: {kind: inline}
  split: {heldout_fraction: 0.2}
tokenizer: {kind: python, path: "own/tokenizer.py:Bytes"}
optimizer: {kind: python, path: "own/optimizer.py:SignMomentum"}
schedule: {kind: python, path: "own/schedule.py:Stairs", warmup_tokens: 64}
batch: {sequence_length: 32, sequences: 2}
train: {tokens: 256, precision: fp32}
evaluation: {metrics: [{kind: python, path: "own/metric.py:TopK"}]}
launch: {processes: 1}
generation: {max_new_tokens: 2}
"""

# Words of a command of each verb that goes as far as the verb's code, if it runs any.
WORDS = {
    "init": "crawl --output made.yaml",
    "demo": None,  # its config ships with llmsys
    "prepare": "my.yaml data.folder=other",
    "tokenizer": "my.yaml data.folder=other",
    "train": "my.yaml run.folder=other",
    "preflight": "my.yaml nodes=localhost:1",
    "launch": "my.yaml nodes=127.0.0.1:1 run.folder=other --print",
    "evaluate": "run",
    "generate": "run --prompt a",
    "translate": "run --input my.yaml",
    "estimate": "my.yaml optimizer.kind=adamw",
    "plan": "my.yaml optimizer.kind=adamw gpus=1 device=h100-sxm",
    "dryrun": "my.yaml nodes=1:1 device=h100-sxm",
    "scale": "budget=1e15",
    "calibrate": None,  # it measures the machine
    "reconcile": "run",
    "inspect": "data",
    "report": "run --output page.html",
    "compare": "run moved --output page.html",
    "ablate": "my.yaml my.yaml --output ablated",
    "watch": None,  # it shows a run until Ctrl-C
    "chat": "run",
    "doctor": "coordinates my.yaml --widths 16,32 --steps 1",
    "trace": "run step=1",
    "replay": "run step=1",
    "convert": "run exported",
    "show": "my.yaml",
    "list": "configs",
    "completion": "bash",
}


KINDS = {
    "extractor",
    "rule",
    "tokenizer",
    "optimizer",
    "schedule",
    "metric",
    "mixer",
    "feed_forward",
}


class Planted(NamedTuple):
    """A working directory with a run of code without consent.

    Attributes:
        folder: the directory.
        mark: file that any of the code appends its name to.
    """

    folder: Path
    mark: Path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    folder = tmp_path_factory.mktemp("planted")
    mark = folder / "mark"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LLMSYS_TRUST_CODE", "1")
        make_crawl(Path("crawl"), files=1)
        Path("my.yaml").write_text(CONFIG)
        Path("own").mkdir()
        for template in TEMPLATES.glob("*.py"):
            if template.stem in KINDS:
                line = f"open({str(mark)!r}, 'a').write({template.stem + ' '!r})\n"
                Path("own", template.name).write_text(f"{template.read_text()}\n{line}")
        assert main(["prepare", "my.yaml"]) == 0
        train_here(patch)
        assert main(["train", "my.yaml"]) == 0
        assert {*mark.read_text().split()} == KINDS
        mark.unlink()
    return Planted(folder, mark)


def train_here(patch: pytest.MonkeyPatch) -> None:
    """Train in this process instead of starting ranks."""
    import llmsys.launch.train

    def train(config: object, words: list[str]) -> None:
        assert llmsys.launch.train.main(list(words)) == 0

    patch.setattr("llmsys.launch.launchers.local.run_local_ranks", train)


@pytest.fixture
def without_consent(
    planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Planted]:
    monkeypatch.delenv("LLMSYS_TRUST_CODE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(planted.folder)
    # A process loads a block once, and the run was trained in this one.
    load_python_block.cache_clear()
    measure_block.cache_clear()
    yield planted
    planted.mark.unlink(missing_ok=True)


def test_every_verb_has_a_command_here() -> None:
    assert WORDS.keys() == VERBS.keys()


def test_the_table_in_security_says_which_verbs_run_code() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|no)\b[^|]* \|", text, re.MULTILINE)
    said = {name: answer == "yes" for name, answer in rows}
    assert said == {name: verb.runs_code for name, verb in VERBS.items()}
    assert "`kind: python`" in text


@pytest.mark.parametrize("verb", [name for name, one in VERBS.items() if one.runs_code])
def test_a_verb_that_runs_code_refuses_it_without_consent(
    verb: str, without_consent: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [verb, *WORDS[verb].split()]
    assert main(words) == 2
    answer = capsys.readouterr().err
    assert f"To consent: llmsys {' '.join(words)} --trust-code" in answer
    named = re.findall(r"^  ([0-9a-f]{64})  (.+\.py)$", answer, re.MULTILINE)
    assert named
    for digest, path in named:
        assert compute_file_digest(Path(path).read_bytes()) == digest
    assert not without_consent.mark.exists()


@pytest.mark.parametrize(
    "verb", [name for name, one in VERBS.items() if not one.runs_code and WORDS[name]]
)
def test_a_verb_that_is_said_to_run_no_code_imports_none(
    verb: str, without_consent: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, *(WORDS[verb] or "").split()]) in (0, 2)
    assert not without_consent.mark.exists()
    assert "trust" not in capsys.readouterr().err


def test_consent_of_a_command_ends_with_it_and_its_record_stays(
    without_consent: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["prepare", "my.yaml", "data.folder=kept"]
    assert main([*words, "--trust-code"]) == 0
    assert {*without_consent.mark.read_text().split()} == {"extractor", "rule", "tokenizer"}
    assert len(get_record_path().read_text().splitlines()) == 3
    assert main(words) == 0
    # the same consent is none for a file that prepare does not run
    assert main(["evaluate", "run"]) == 2
    assert "own/metric.py" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [[], ["--trust-code"]], ids=["without", "with"])
def test_ranks_and_workers_have_the_consent_of_their_command(
    flag: list[str], without_consent: Planted, tmp_path: Path
) -> None:
    """In processes of their own, as people start them: two workers that prepare, one rank."""
    folder = tmp_path.name + flag[0] if flag else tmp_path.name
    for words in (
        ["prepare", "my.yaml", f"data.folder={folder}", "data.executor={kind: local, workers: 2}"],
        ["train", "my.yaml", f"run.folder=run-{folder}"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "llmsys.launch.main", *words, *flag],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (0 if flag else 2), done.stderr
        assert ("you have not consented" in done.stderr) == (not flag)
    assert without_consent.mark.exists() == bool(flag)


def test_a_run_that_came_from_elsewhere_needs_consent(
    without_consent: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Consent is to bytes: the user's own code does not cover that of a copy that was changed."""
    assert main(["evaluate", "run", "--trust-code"]) == 0
    for name in ("run", "own"):
        (tmp_path / "other" / name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", name, tmp_path / "other" / name], check=True)
    metric = tmp_path / "other" / "own" / "metric.py"
    metric.write_text(metric.read_text() + "#")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "other")
        without_consent.mark.unlink()
        assert main(["evaluate", "run"]) == 2
    assert "own/metric.py" in capsys.readouterr().err
    assert not without_consent.mark.exists()
