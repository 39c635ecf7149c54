"""Laws of what a launch and a run write: no secret in any file, and files with an environment
for their owner alone.
"""

import json
import sys
from pathlib import Path

import pytest
import yaml

from llmsys.config.run import RunConfig
from llmsys.launch.launchers.run_bundle import format_deepspeed_environment, list_withheld_secrets
from llmsys.launch.main import main
from llmsys.train.run_folder import write_run_record

SECRETS = {
    "WANDB_API_KEY": "hush",
    "HF_PAT": "hush",
    "NCCL_AUTH": "hush",
    "DS_PASSPHRASE": "hush",
    "UCX_CREDENTIALS": "hush",
    "HF_ENDPOINT": "https://me:hush@mirror.example",
    "WANDB_BASE_URL": "https://wandb.example/?token=hush",
}
INPUTS = [
    "https://me:hush@host/a.warc.gz",
    "https://b.s3.amazonaws.com/b.gz?X-Amz-Signature=hush&part=1",
]


def launch(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """`llmsys launch --print` of a run with secrets in its environment, its inputs and the
    user's own file.
    """
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    (folder / ".deepspeed_env").write_text("MY_PAT=hush\nMIRROR=https://me:hush@host/\nPLAIN=1\n")
    values = {
        "run": {"folder": str(folder / "my runs" / "a b")},
        "batch": {"sequence_length": 8, "sequences": 8},
        "data": {"inputs": INPUTS},
    }
    (folder / "toy.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.chdir(folder)
    arguments = [
        "launch",
        str(folder / "toy.yaml"),
        "data.inputs.0=https://me:hush@host/c.gz",
        *words,
        "--print",
    ]
    monkeypatch.setattr(sys, "argv", ["llmsys", *arguments])
    return main(arguments)


@pytest.mark.parametrize("nodes", ["nodes=10.9.8.1:2,10.9.8.2:2", "nodes=2"])
def test_a_launch_writes_no_secret_and_its_environment_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nodes: str
) -> None:
    assert launch(tmp_path, monkeypatch, nodes, "launch.processes=2") == 0
    said = capsys.readouterr()
    kit = tmp_path / "my runs" / "a b" / "launch"
    written = {file.name: file.read_text() for file in kit.iterdir()}
    assert [name for name, text in written.items() if "hush" in text] == []
    assert "hush" not in said.out + said.err
    for name in (*SECRETS, "MY_PAT", "MIRROR"):
        assert f"{name} looks like a secret and is not copied" in said.err
    assert "export NCCL_DEBUG=INFO" in written["environment.sh"]
    assert "PLAIN=1" in written[".deepspeed_env"]
    assert "https://REDACTED@host/c.gz" in written["config.yaml"]
    assert "X-Amz-Signature=REDACTED&part=1" in written["config.yaml"]
    assert "data.inputs.0=https://REDACTED@host/c.gz" in json.loads(written["code.json"])["command"]
    private = {"environment.sh", ".deepspeed_env", "code.json", "code.diff"} | written.keys() & {
        "run.sh",
        "job.sbatch",
    }
    assert {name for name in private if (kit / name).stat().st_mode & 0o077} == set()


def test_an_option_of_sbatch_with_a_secret_is_refused_and_no_job_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        launch(
            tmp_path,
            monkeypatch,
            "nodes=2",
            "launch.processes=2",
            "--sbatch=--export=ALL,HF_TOKEN=hush",
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "--sbatch='--export=ALL,HF_TOKEN=REDACTED' holds a secret, and job.sbatch is in the "
        "shared run"
    ) in said
    assert "set it in the environment of every node" in said
    assert "hush" not in said
    assert not (tmp_path / "my runs" / "a b" / "launch" / "job.sbatch").exists()


def test_secrets_of_the_users_own_file_are_named_by_name_and_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("MY_PAT=hush\nMIRROR=https://me:hush@host/=\nPLAIN=a=b\n")
    monkeypatch.setattr("llmsys.launch.launchers.run_bundle._list_user_files", lambda: [theirs])
    assert format_deepspeed_environment({}, [theirs]) == "PLAIN=a=b\n"
    assert list_withheld_secrets({"HF_HOME": "/x", "HF_PAT": "hush"}) == [
        "HF_PAT",
        "MIRROR",
        "MY_PAT",
    ]


def test_the_record_of_a_run_has_the_source_of_the_code_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no checkout
    config = RunConfig.model_validate(
        {"run": {"folder": str(tmp_path / "run")}, "data": {"kind": "crawl", "inputs": INPUTS}}
    )
    write_run_record(config, "abc", 1)
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert Path(environment["source"]["folder"], "llmsys", "train", "run_folder.py").is_file()
    assert environment["source"].keys() == {
        "version",
        "folder",
        "branch",
        "commit",
        "uncommitted_changes",
    }
    assert (tmp_path / "run" / "environment.json").stat().st_mode & 0o777 == 0o600
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert "hush" not in text
    assert "https://REDACTED@host/a.warc.gz" in text
