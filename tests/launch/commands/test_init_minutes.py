"""`llmsys init --minutes` fills the time by the measured step, and writes what it promises."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmsys.calibrate import machine_probe, training_steps
from llmsys.calibrate.training_steps import StepRate
from llmsys.config.loading.load import load_run_config
from llmsys.config.promise import PromisedInterval
from llmsys.config.run import RunConfig
from llmsys.config.train import EVALUATED_COST
from llmsys.data_pipeline.inspection.text_sample import TextSample
from llmsys.estimate.device_profile import load_device_profile
from llmsys.launch.commands.init_minutes import MAX_PASSES, RESERVE, SizedRun, plan_run_minutes
from llmsys.launch.main import main
from llmsys.train import precision as train_precision
from llmsys.train.precision import NativeSupport
from tests.helpers.example_run import write_dataset
from tests.llmsys.calibrate.test_machine_probe import MEASURED

SAMPLE = TextSample(1.0, num_bytes=1 << 21, num_characters=90, bytes_per_token={2_048: 2.95})
STEP_SECONDS = 0.25


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of texts on a machine whose chosen model takes a quarter of a second a step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_probe, "get_machine_profile", lambda renew: MEASURED)
    rate = StepRate(STEP_SECONDS, 0.02, 20, 1)
    monkeypatch.setattr(training_steps, "measure_fastest_rate", lambda *_: rate)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    support = NativeSupport(True, "as asked")
    monkeypatch.setattr(train_precision, "find_bf16_support", lambda device: support)
    Path("texts").mkdir()
    rows = (json.dumps({"text": f"{n} " + "a text of the folder. " * 60}) for n in range(300))
    Path("texts/a.jsonl").write_text("\n".join(rows))


def count_minutes(run: SizedRun) -> float:
    work = run.tokens + EVALUATED_COST * run.evaluated_tokens
    return work / (256 * run.sequences) * STEP_SECONDS / 60


def test_the_tokens_fill_the_minutes_by_the_measured_step() -> None:
    run = plan_run_minutes(10, 1e9, SAMPLE)
    assert count_minutes(run) == pytest.approx(10 * (1 - RESERVE), rel=0.01)
    assert run.promise.minutes.middle == pytest.approx(10, rel=0.01)
    assert run.promise.minutes.low < 9.6 < 10.4 < run.promise.minutes.high
    assert run.promise.tokens == run.tokens


@pytest.mark.parametrize(("is_native", "precision"), [(False, "fp32"), (True, "bf16")])
def test_the_measured_step_has_the_dtype_of_training(
    is_native: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def measure(config: RunConfig, _: float) -> StepRate:
        found.append(config.train.precision)
        return StepRate(STEP_SECONDS, 0.02, 20, 1)

    monkeypatch.setattr(training_steps, "measure_fastest_rate", measure)
    support = NativeSupport(is_native, "as asked")
    monkeypatch.setattr(train_precision, "find_bf16_support", lambda device: support)
    assert "bf16" in MEASURED.peak_flops
    plan_run_minutes(10, 1e9, SAMPLE)
    assert found == [precision]


def test_pieces_that_are_half_bytes_are_for_small_texts_and_say_nothing_of_others() -> None:
    """A vocabulary of 512, whose tokens say that a text is twice as easy as others say."""
    assert plan_run_minutes(1, 50_000, SAMPLE).vocabulary == 512
    odd = replace(SAMPLE, bytes_per_token=SAMPLE.bytes_per_token | {512: 3.2})
    for minutes in (0.5, 1):
        run = plan_run_minutes(minutes, 2e7, odd)
        assert run.vocabulary >= 1_024
        assert run == plan_run_minutes(minutes, 2e7, SAMPLE)


def test_more_minutes_promise_a_lower_loss_of_a_larger_model() -> None:
    short, long = plan_run_minutes(1, 1e9, SAMPLE), plan_run_minutes(1_000, 1e9, SAMPLE)
    assert long.promise.bits_per_byte.middle < 0.9 * short.promise.bits_per_byte.middle
    assert long.parameters > short.parameters
    assert long.vocabulary > short.vocabulary


def test_longer_tokens_promise_fewer_bits_per_byte() -> None:
    short = replace(SAMPLE, bytes_per_token={2_048: 2.4})
    assert (
        plan_run_minutes(2, 1e9, SAMPLE).promise.bits_per_byte.middle
        < 0.9 * plan_run_minutes(2, 1e9, short).promise.bits_per_byte.middle
    )


def test_a_small_text_is_not_repeated_without_end() -> None:
    run = plan_run_minutes(60, 3e5, SAMPLE)
    assert run.tokens <= MAX_PASSES * run.unique_tokens
    assert run.promise.minutes.middle == pytest.approx(count_minutes(run) / (1 - RESERVE), rel=0.01)
    assert run.promise.minutes.middle < 30


def test_a_text_of_many_characters_has_a_piece_for_each() -> None:
    chinese = replace(SAMPLE, num_characters=4_350)
    assert plan_run_minutes(1, 1.8e6, SAMPLE).vocabulary < 4_096
    assert plan_run_minutes(1, 1.8e6, chinese).vocabulary == 8_192
    # A crawl of 21 MB in many languages, whose tokenizer needed 2,336 pieces for characters alone.
    crawl = replace(SAMPLE, num_characters=1_272)
    assert plan_run_minutes(1, 21e6, crawl).vocabulary == 4_096


def get_width(interval: PromisedInterval) -> float:
    return interval.high / interval.low


def test_a_busy_machine_is_promised_a_loss_in_a_wider_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = plan_run_minutes(10, 1e9, SAMPLE)
    monkeypatch.setattr("os.getloadavg", lambda: (200.0, 0.0, 0.0))
    busy = plan_run_minutes(10, 1e9, SAMPLE)
    assert "other programs keep this machine busy" in busy.how
    assert "busy" not in calm.how
    # The run fits its tokens to the minutes, whatever the speed is, and so its loss follows it.
    assert get_width(calm.promise.minutes) < 1.15 < get_width(busy.promise.minutes) < 1.3
    assert get_width(busy.promise.bits_per_byte) > 1.01 * get_width(calm.promise.bits_per_byte)


def test_an_accelerator_is_promised_by_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = plan_run_minutes(10, 1e9, SAMPLE).promise
    device = load_device_profile("rtx-4090")
    monkeypatch.setattr(machine_probe, "get_machine_profile", lambda renew: device)
    run = plan_run_minutes(10, 1e10, SAMPLE)
    assert "by the profile of GeForce RTX 4090 24GB, not measured" in run.how
    assert run.promise.minutes.middle == pytest.approx(10, rel=0.02)
    assert get_width(run.promise.bits_per_byte) > get_width(on_cpu.bits_per_byte)


def test_the_config_has_the_promise_and_the_command_prints_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["init", "texts", "--minutes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "promised: " in printed
    config: RunConfig = load_run_config("my.yaml")
    assert config.promise is not None
    assert config.promise.tokens == config.train.tokens
    assert config.train.threads_per_process == 1
    assert config.train.fit_minutes == config.promise.minutes.middle
    assert config.tokenizer.vocab_size == config.model.vocab_size
    assert config.promise.machine == "two threads"
    assert main(["init", "texts", "--minutes", "1", "--output", "b.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["promise"]
    assert found == config.promise.model_dump(mode="json")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["texts", "--minutes", "0.1"], "--minutes 0.1 is not between 0.2"),
        (["texts", "--minutes", "20000"], "and 10,080 (a week)"),
        (["texts", "--minutes", "soon"], "'soon' is not a number above 0"),
        (["model", "--minutes", "5"], "has its size already. Leave out the model"),
        (["data", "--minutes", "5"], "has its tokens already. Give the folder of its texts"),
        (["--template", "rule", "--output", "a.py", "--minutes", "5"], "Give one of the two."),
        (["empty", "--minutes", "5"], "no text is kept of a sample of empty/*.txt"),
        (["few", "--minutes", "5"], "promises a loss on held-out documents, and few/*.txt has 2"),
    ],
)
def test_what_has_no_minutes_is_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama"}')
    write_dataset(Path("data"))
    for name, files in (("empty", 10), ("few", 2)):
        Path(name).mkdir()
        for number in range(files):
            Path(name, f"{number}.txt").write_text("  ")
    assert main(["init", *words]) == 2
    assert why in capsys.readouterr().err
    assert not Path("my.yaml").exists()
