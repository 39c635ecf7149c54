"""The bench of a step runs on a CPU too."""

import json
import subprocess
import sys

from llmsys.doctor.step_check import NARROW_DENSE


def test_a_step_is_measured_and_its_operators_are_listed() -> None:
    words = [
        "model/llama3.2-1b",
        *NARROW_DENSE,
        "batch.sequences=2",
        "train.precision=fp32",
        "--steps",
        "1",
    ]
    command = [sys.executable, "-m", "tools.bench.device_step", *words, "--kernels", "3"]
    first, *kernels = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = json.loads(first)
    assert found["step_ms"] > 0
    assert found["tokens_per_second"] > 0
    assert found["losses"][0] > found["losses"][-1]
    assert len(kernels) == 3
