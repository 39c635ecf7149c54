"""What a plan or an estimate takes for granted is said, with the way to choose."""

from pathlib import Path

import pytest

from llmsys.launch.main import main

PLAN = "plan model/llama3.2-1b batch.sequences=8 --json"
ESTIMATE = "estimate model/llama3.2-1b batch.sequences=8 --json --cluster"
ASSUMED = "assumed, as nothing else was given: "
DEVICE = "device h100-sxm"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{PLAN} gpus=2", f"{DEVICE}. Choose with device=NAME;"),
        (f"{PLAN} gpus=2 --check dp=2", f"{DEVICE}. Choose with device=NAME;"),
        (
            f"{PLAN} cluster=price.yaml",
            f"{DEVICE}, number of devices 8. Choose with device=NAME gpus=N;",
        ),
        (f"{PLAN} gpus=2 device=h100-sxm", ""),
        (f"{PLAN} cluster=all.yaml", ""),
        (
            f"{ESTIMATE} price.yaml --html a.html",
            f"{DEVICE}, number of devices 8. Choose with --device NAME --gpus N;",
        ),
        (f"{ESTIMATE} price.yaml --gpus 2", f"{DEVICE}. Choose with --device NAME;"),
        (f"{ESTIMATE} price.yaml --device h200", ""),
        (f"{ESTIMATE} all.yaml", ""),
    ],
)
def test_a_device_that_nobody_named_is_said_to_be_assumed(
    command: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("price.yaml").write_text("price_per_hour: 2\n")
    Path("all.yaml").write_text("{device: h200, devices: 2}\n")
    assert main(command.split()) == 0
    hint = " llmsys list devices names the devices.\n"
    assert capsys.readouterr().err == (f"{ASSUMED}{expected}{hint}" if expected else "")
