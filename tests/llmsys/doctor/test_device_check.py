"""The doctor of devices passes where all is well, and names what is wrong with a kernel, a sum
or a step.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llmsys.doctor import attention_parity, collective_check, device_check, step_comparison
from llmsys.doctor.attention_parity import CASES, check_attention
from llmsys.doctor.check_row import CheckRow, build_row, format_rows, merge_ranks
from llmsys.doctor.device_check import DeviceCheckTask, check_device, list_tasks, write_report
from llmsys.doctor.rank_pool import TaskFailure
from llmsys.doctor.step_check import MODELS, StepMeasurement
from llmsys.doctor.step_comparison import build_memory_row, build_speed_row
from llmsys.errors import ConfigError
from llmsys.kernels.attention_kernel import choose_attention_kernel
from llmsys.launch.commands import doctor
from llmsys.launch.main import main
from llmsys.model.scaled_dot_product import compute_attention
from llmsys.parallel.process_group import init_process_group
from tests.helpers.device_profile import build_abacus
from tests.helpers.pretended_accelerator import HOPPER, pretend_accelerator

CPU = torch.device("cpu")
OVERRIDES = MODELS[0].list_overrides("cpu", 1, "fp32")


def test_every_kernel_of_training_on_an_accelerator_has_a_case() -> None:
    chosen = {
        choose_attention_kernel(HOPPER, attention_parity._describe_case(case, dtype)).kernel
        for case in CASES
        for dtype in attention_parity.DTYPES
    }
    assert chosen == {"varlen", "flex", "sdpa"}
    reasons = {
        choose_attention_kernel(HOPPER, attention_parity._describe_case(case, "bf16")).reason
        for case in CASES
    }
    assert len(reasons) >= 9


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_kernel_of_an_accelerator_agrees_with_plain_operations(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that a Hopper device gets, by the twins that they have on a CPU."""
    monkeypatch.setattr(attention_parity, "LENGTH", 160)
    pretend_accelerator(monkeypatch)
    [row] = check_attention(number, ("bf16",), CPU)
    assert row.state == "ok", row
    assert 0 < row.values["output"] < row.values["gradient"] * 10


def test_a_kernel_that_is_wrong_or_missing_is_a_row_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend_to_one_key_less(
        q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> Tensor:
        return compute_attention(
            q, k, v, replace(mask, visible_B1TS=mask.visible_B1TS.roll(1, 3)), **options
        )

    monkeypatch.setattr(attention_parity, "compute_attention", attend_to_one_key_less)
    [row] = check_attention(1, ("fp32",), CPU)
    assert (row.name, row.state) == ("documents, fp32", "FAIL")

    # an output alone, a gradient alone
    for wrong in (lambda out, q: out + 0.1, lambda out, q: out + (q - q.detach())):
        monkeypatch.setattr(
            attention_parity,
            "compute_attention",
            lambda q, k, v, mask, wrong=wrong, **options: wrong(
                compute_attention(q, k, v, mask, **options), q
            ),
        )
        [row] = check_attention(1, ("fp32",), CPU)
        assert row.state == "FAIL"
        assert min(row.values["output"], row.values["gradient"]) < 1e-4

    def raise_no_kernel(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel image is available\nfor this device")

    monkeypatch.setattr(attention_parity, "compute_attention", raise_no_kernel)
    [row] = check_attention(1, ("bf16",), CPU)
    assert (row.state, row.text) == ("FAIL", "chunked: RuntimeError: no kernel image is available")


def test_a_wrong_sum_is_a_row_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_check, "MEASURED_BYTES", {"cpu": 256})
    case = collective_check.CASES[0]
    with init_process_group():
        [alone] = collective_check.check_collectives(CPU)
        assert (alone.state, alone.text) == (
            "not run",
            "one rank has nobody to send to: use --processes",
        )
        assert collective_check._check_case(case, CPU, 0, 1).state == "ok"
        assert (
            collective_check._check_case(replace(case, call=lambda x: x + 1), CPU, 0, 1).state
            == "FAIL"
        )

        def refuse(x: Tensor) -> Tensor:
            raise dist.DistBackendError("NCCL error: unhandled\nsystem error")

        row = collective_check._check_case(replace(case, call=refuse), CPU, 0, 1)
    assert (row.state, row.text) == ("FAIL", "DistBackendError: NCCL error: unhandled")


def test_the_rank_that_failed_is_named() -> None:
    good, bad = (
        build_row("attention", "causal", True, "fine"),
        build_row("attention", "causal", False, "off by 1"),
    )
    [row] = merge_ranks([[good], [bad], [good]])
    assert (row.state, row.text) == ("FAIL", "off by 1 (rank 1 of 3)")
    assert merge_ranks([[good], [good]]) == [good]


def test_time_is_compared_with_the_estimate_and_far_slower_fails() -> None:
    measured = StepMeasurement(0, OVERRIDES, 1e-4, 0, (6.0,))
    row = build_speed_row(measured, 1, build_abacus())
    assert row.state == "ok"
    assert row.values["mfu"] / row.values["estimate"]["utilisation"][
        "model_causal"
    ] == pytest.approx(1 / row.values["ratio"], rel=1e-3)
    slow = build_speed_row(
        replace(measured, seconds=3 * row.values["estimate"]["step_seconds"]["p90"]),
        1,
        build_abacus(),
    )
    assert slow.state == "FAIL"
    assert "more than 2 times the P90" in slow.text
    assert "no device profile to compare with" in build_speed_row(measured, 1, None).text
    unlinked = build_speed_row(
        replace(measured, overrides=MODELS[0].list_overrides("cpu", 2, "fp32")),
        2,
        build_abacus(node=None),
    )
    assert "not compared: the profile of abacus has no node link" in unlinked.text


def test_memory_is_compared_with_a_dry_run_of_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def run_dry(request: Any) -> dict[str, Any]:
        asked.append(request)
        sizes = {
            "build": 9 << 30,
            "step 1: optimizer": 8 << 30,
            "step 2: optimizer": 2 << 30,
            "evaluation": 7 << 30,
        }
        return {
            "memory": {
                "phases": [{"name": name, "peak_bytes": size} for name, size in sizes.items()]
            }
        }

    monkeypatch.setattr(step_comparison, "run_dry_run", run_dry)
    measured = StepMeasurement(2, OVERRIDES, 1.0, int(1.95 * 2**30), ())
    row = build_memory_row(measured, 8, "h100-sxm")
    assert (row.state, row.text) == ("ok", "1.95 GiB, dry run 2.00 GiB (-2.5%)")
    assert (asked[0].config, asked[0].overrides) == ("model/olmoe-1b-7b", OVERRIDES)
    assert (asked[0].nodes, asked[0].node_devices, asked[0].device) == (1, 8, "h100-sxm")
    assert (
        build_memory_row(replace(measured, peak_bytes=int(2.3 * 2**30)), 8, "h100-sxm").state
        == "FAIL"
    )
    assert build_memory_row(replace(measured, peak_bytes=0), 8, "h100-sxm").state == "not run"
    assert (
        build_memory_row(measured, 8, None).text
        == "this device has no profile to dry-run on: use --device"
    )

    def refuse(request: Any) -> dict[str, Any]:
        raise ConfigError("no compiler\nfor the guard")

    monkeypatch.setattr(step_comparison, "run_dry_run", refuse)
    assert build_memory_row(measured, 8, "h100-sxm").text == "the dry run failed: no compiler"


@pytest.mark.distributed
def test_two_ranks_are_checked_from_end_to_end(tmp_path: Path) -> None:
    """One of each kind of task, on two processes and a CPU; the whole list takes minutes."""
    chosen = [
        ("machine", 0),
        ("attention", 0),
        ("collectives", 0),
        ("determinism", 1),
        ("steps", 2),
    ]
    kinds = [one for one in list_tasks() if (one.kind, one.number) in chosen]
    report = check_device(kinds, 2, dtypes=("fp32",))
    sections = {section: [row for row in report.rows if row.section == section] for section in (
        "attention", "collectives", "determinism", "speed", "memory",
    )}  # fmt: skip
    assert {section: len(rows) for section, rows in sections.items()} == {
        "attention": 1, "collectives": 9, "determinism": 1, "speed": 1, "memory": 1,
    }  # fmt: skip
    assert not report.failed_rows, format_rows(report.failed_rows)
    assert "equal bits" in sections["determinism"][0].text
    assert {row.state for row in sections["memory"]} == {"not run"}
    assert all(one.losses[-1] < one.losses[0] for one in report.steps)
    written = json.loads(write_report(report, tmp_path / "sent").read_text())
    assert (written["passed"], written["ranks"], len(written["rows"])) == (
        True,
        2,
        len(report.rows),
    )
    assert [rank["kind"] for rank in written["machine"]["ranks"]] == ["cpu", "cpu"]
    assert str(Path.home()) not in json.dumps(written)


def test_a_failure_is_named_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that died in a task, and a kernel that is wrong."""

    def run_tasks(task: Any, numbers: Any, ranks: int, timeout_seconds: float) -> Any:
        yield 0, {"ranks": []}
        yield 1, [build_row("attention", "causal, bf16", False, "varlen: output off by 1.0")]
        yield 2, TaskFailure("rank 1 ended without an answer")
        yield 3, [CheckRow("collectives", "all", "not run", "one rank")]

    tasks = [
        DeviceCheckTask("machine"),
        *(DeviceCheckTask("attention", n) for n in range(2)),
        DeviceCheckTask("collectives"),
    ]
    monkeypatch.setattr(device_check, "run_tasks", run_tasks)
    monkeypatch.setattr(doctor, "set_device_variables", lambda folder: None)  # of this process
    monkeypatch.setattr(device_check, "list_tasks", lambda: tasks)
    assert main(["doctor", "device", "--processes", "2", "--output", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "FAIL     attention    causal, bf16  varlen: output off by 1.0"
    assert printed[3:5] == ["failed: attention, causal, bf16", "failed: attention, documents"]
    assert printed[5].endswith(f"send {tmp_path / 'out' / 'device-check.json'} back")
    assert json.loads((tmp_path / "out" / "device-check.json").read_text())["passed"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model/gpt2-small"],
            "doctor device trains its own models, not model/gpt2-small. Leave it out.",
        ),
        (["--processes", "1,2"], "--processes 1,2: doctor device takes one number of ranks."),
        (["--precision", "fp8"], "--precision fp8 is unknown. Use fp32, bf16 or fp16."),
        (
            ["--device", "h1000"],
            "'h1000' has no device profile, and no other profile is used instead.",
        ),
    ],
)
def test_what_the_device_check_cannot_do_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "set_device_variables", lambda folder: None)  # of this process
    assert main(["doctor", "device", *words, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
