"""What is missing is said before torch is imported, which takes seconds."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """\
run: {folder: nothing}
data: {kind: crawl, folder: data, inputs: ["crawl/*"]}
model: {base: model/llama3.2-1b}
train: {tokens: 10_000_000}
"""
PROGRAM = """\
import sys
from llmsys.launch.main import main
status = main(sys.argv[1:])
sys.exit(f"torch was imported") if "torch" in sys.modules else sys.exit(status)
"""
DATASET = "data is not a prepared dataset (manifest.json is missing), which"
CHECKPOINT = "nothing/checkpoints has no complete checkpoint."


@pytest.mark.parametrize(("words", "message"), [
    ("evaluate my.yaml", f"{DATASET} an evaluation needs. Prepare it first: llmsys prepare my.y"),
    ("trace my.yaml step=1", f"{DATASET} a trace needs."),
    ("train my.yaml", f"{DATASET} training needs."),
    ("generate my.yaml --prompt word", CHECKPOINT),
    ("chat my.yaml", CHECKPOINT),
    ("translate my.yaml --input my.yaml", CHECKPOINT),
    ("replay my.yaml step=1", "nothing has no events.jsonl, so no run was trained there."),
])  # fmt: skip
def test_a_missing_folder_is_named_without_torch(words: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(CONFIG)
    command = [sys.executable, "-c", PROGRAM, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert message in done.stderr
    assert done.returncode == 2, done.stderr
