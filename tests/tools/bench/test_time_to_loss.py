"""The race to a held-out loss: the judge, the rows, each contender on tiny models, resumption and
the table. No time is asserted.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from tests.helpers.dataset import VOCABULARY, make_dataset
from tools.bench import time_to_loss
from tools.bench.race import hugging_face, judge, ours, plain_loop
from tools.bench.race.judge import ABSENT, EvaluationSteps, Judge
from tools.bench.race.rows import LENGTH, build_heldout_rows
from tools.bench.time_to_loss import (
    SYSTEMS,
    Contender,
    Race,
    Recipe,
    Result,
    build_recipe_spec,
    format_table,
    run_module,
    scale_schedule,
    write_page,
)

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TABLE = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


@dataclass
class Documents:
    """Held-out documents that end with id 3."""

    documents: list[list[int]]
    text_bytes: NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        """Their number."""
        return len(self.documents)

    def get_tokens(self, number: int) -> NDArray[np.uint16]:
        """Return the ids of one."""
        return np.array(self.documents[number], np.uint16)


def write_rows(file: Path, rows: int = 8, length: int = 16) -> Path:
    """Write training rows that count up, so that a model learns them, and held-out rows alike."""
    ids = (np.arange(rows * (length + 1)).reshape(rows, -1) % 60 + 4).astype(np.uint16)
    heldout = ids[:, :-1].copy()
    targets = ids[:, 1:].astype(np.int32)
    targets[-1, 5:] = ABSENT
    np.savez(
        file,
        train=ids,
        heldout=heldout,
        heldout_targets=targets,
        heldout_bytes=np.full(rows, 40.0),
    )
    return file


def build_spec(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """Return what a contender reads for three steps of two rows."""
    spec = {
        "rows": str(write_rows(tmp_path / "rows.npz")),
        "result": str(tmp_path / "result.json"),
        "target": 0.1,
        "seed": 0,
        "shape": SHAPE,
        "sequences": 2,
        "steps": 3,
        "warmup": 1,
        "learning_rate": 1e-2,
        "look_every": 1,
        "look_first": 2,
    }
    return spec | changes


def compute_table_logits(ids_BT: Tensor) -> Tensor:
    """Return logits of a model that is a table."""
    return TABLE[ids_BT]


def test_every_id_of_a_heldout_document_is_predicted_once_from_the_ids_before_it() -> None:
    long = [*(np.arange(LENGTH + 5) % 50 + 4).tolist(), 3]
    shards = Documents([[7, 8, 3], long], np.array([30, 900]))
    inputs, targets, text_bytes = build_heldout_rows(shards)  # type: ignore[arg-type]
    assert inputs.shape == targets.shape == (3, LENGTH)
    assert inputs[0, :3].tolist() == [3, 7, 8]
    assert targets[0, :4].tolist() == [7, 8, 3, ABSENT]
    assert targets[1:][targets[1:] != ABSENT].tolist() == long
    # A row goes on where the one before it ended.
    assert inputs[2, 0] == long[LENGTH - 1]
    assert text_bytes.sum() == pytest.approx(930)


def test_the_judge_measures_the_bits_per_byte_of_numpy(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.npz")
    with np.load(rows) as file:
        ids, targets = file["heldout"].astype(int), file["heldout_targets"]
    logits = TABLE.numpy().astype(np.float64)[ids]
    log_sums = np.log(np.exp(logits).sum(-1))
    nats = sum(
        log_sums[row, place] - logits[row, place, target]
        for (row, place), target in np.ndenumerate(targets)
        if target != ABSENT
    )
    found = Judge(rows, 0).measure_bits_per_byte(compute_table_logits, 1)
    assert found == pytest.approx(nats / math.log(2) / (8 * 40), rel=1e-6)


def test_only_a_look_at_all_rows_reaches_the_target(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.npz")
    whole = Judge(rows, 0).measure_bits_per_byte(compute_table_logits, 1)
    quick = Judge(rows, 0).measure_bits_per_byte(compute_table_logits, judge.QUICK)
    far = Judge(rows, quick - 1)
    assert not far.look(compute_table_logits, 10)
    assert not far.look(compute_table_logits, 20, is_last=True)
    assert [look.is_whole for look in far.evaluations] == [False, True]
    assert far.evaluations[0].bits_per_byte == pytest.approx(quick)
    assert far.evaluations[1].bits_per_byte == pytest.approx(whole)
    near = Judge(rows, max(whole, quick) + 1e-3)
    assert near.look(compute_table_logits, 10)
    assert near.evaluations[-1].is_whole
    assert near.own_seconds > 0


def test_looks_are_at_even_distances_before_the_last_step() -> None:
    looks = EvaluationSteps(10, 3, 4)
    assert [step for step in range(1, 11) if looks.is_due(step)] == [4, 7, 10]


def test_the_plain_decoder_has_the_logits_and_gradients_of_llama() -> None:
    torch.manual_seed(0)
    plain = plain_loop.Decoder(SHAPE, 16)
    llama = hugging_face.build_model({"shape": SHAPE})
    copy_weights(plain, llama)
    ids = torch.randint(0, 64, (3, 16))
    expected = llama(input_ids=ids).logits
    found = plain(ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    expected.logsumexp(-1).sum().backward()
    found.logsumexp(-1).sum().backward()
    assert plain.embed.weight.grad is not None
    torch.testing.assert_close(
        plain.embed.weight.grad, llama.model.embed_tokens.weight.grad, rtol=1e-4, atol=1e-4
    )


def copy_weights(plain: plain_loop.Decoder, llama: Any) -> None:
    """Give transformers' model the weights of the plain one."""
    state = {
        "model.embed_tokens.weight": plain.embed.weight,
        "lm_head.weight": plain.embed.weight,
        "model.norm.weight": plain.norm.weight,
    }
    for number, block in enumerate(plain.blocks):
        assert isinstance(block, plain_loop.Block)
        key, value = block.kv.weight.chunk(2)
        gate, up = block.gate_up.weight.chunk(2)
        state |= {
            f"model.layers.{number}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": block.before_attention.weight,
                "self_attn.q_proj": block.q.weight,
                "self_attn.k_proj": key,
                "self_attn.v_proj": value,
                "self_attn.o_proj": block.out.weight,
                "post_attention_layernorm": block.before_mlp.weight,
                "mlp.gate_proj": gate,
                "mlp.up_proj": up,
                "mlp.down_proj": block.down.weight,
            }.items()
        }
    llama.load_state_dict({name: weight.detach() for name, weight in state.items()})
    llama.config.rms_norm_eps = 1e-5
    for module in llama.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def test_the_rate_of_the_plain_loop_is_that_of_transformers_but_for_the_last_tenth() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = transformers.get_cosine_schedule_with_warmup(optimizer, 4, 20)
    for step in range(1, 21):
        expected = theirs.lr_lambdas[0](step)
        found = plain_loop.compute_rate(step, 20, 4, 1.0)
        assert found == pytest.approx(expected if step <= 4 else 0.1 + 0.9 * expected)


@pytest.mark.parametrize("module", [plain_loop, hugging_face])
def test_a_contender_trains_to_the_end_of_its_budget_or_to_the_target(
    module: Any, tmp_path: Path
) -> None:
    module.train(build_spec(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    looks = result["evaluations"]
    assert [look["tokens"] for look in looks] == [64, 96]
    assert looks[-1]["is_whole"]
    assert looks[1]["bits_per_byte"] < looks[0]["bits_per_byte"]
    assert looks[0]["cpu_seconds"] <= looks[1]["cpu_seconds"]
    module.train(build_spec(tmp_path, target=9.0))
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [look["tokens"] for look in result["evaluations"]] == [64]


def test_mixtral_has_the_parameters_of_the_demo() -> None:
    from llmsys.config.loading.load import load_model_config
    from llmsys.estimate.model_tensors import count_parameters

    system = SYSTEMS["trainer-mixtral"]
    assert isinstance(system, Contender)
    with torch.device("meta"):
        model = hugging_face.build_model({"shape": system.shape})
    expected = count_parameters(load_model_config("model/demo-moe")).total
    assert model.num_parameters() == pytest.approx(expected, rel=0.01)


@pytest.mark.distributed
def test_llmsys_is_judged_at_the_looks_alone(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    config = {
        "data": {"folder": str(tmp_path / "data")},
        "tokenizer": {"kind": "sentencepiece", "vocab_size": VOCABULARY},
        "model": SHAPE | {"vocab_size": VOCABULARY},
        "batch": {"sequence_length": 16, "sequences": 2},
        "train": {"tokens": 128, "precision": "fp32"},
        "schedule": {"kind": "constant"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    ours.train(
        {
            "rows": str(write_rows(tmp_path / "rows.npz")),
            "result": str(tmp_path / "result.json"),
            "target": 0.1,
            "seed": 0,
            "config": str(tmp_path / "config.yaml"),
            "words": ["evaluation.every_steps=1"],
            "looks": 4,
            "look_share": 0.5,
        }
    )
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert [look["tokens"] for look in result["evaluations"]] == [64, 96, 128]
    assert [look["is_whole"] for look in result["evaluations"]] == [False, False, True]


def build_result(tokens: int, seconds: float, bits: float, *, is_whole: bool = True) -> Result:
    """Return the result of a run with one look."""
    look = {
        "tokens": tokens, "cpu_seconds": seconds, "bits_per_byte": bits, "is_whole": is_whole,
    }  # fmt: skip
    return Result(5_000_000, [look], 1e-3)


def test_the_table_has_medians_and_names_who_does_not_reach_the_target(tmp_path: Path) -> None:
    race = Race(tmp_path, 2.0, 4096, 2048)
    found = {
        "trainer-llama": [build_result(9000, 90.0, 1.9), build_result(9000, 60.0, 2.0),
                          build_result(9000, 99.0, 2.1)],
        "plain-loop": [build_result(9000, 50.0, 2.2)] * 3,
        "llmsys-small": [build_result(2000, 30.0, 1.9)] * 3,
    }  # fmt: skip
    rows = [line.split(" | ") for line in format_table(race, found).splitlines()[4:]]
    assert rows[0][3:] == ["9,000", "90", "3.00", "2 of 3 |"]
    assert rows[1][3:] == ["not in 9,000: best 2.200", "over 50", "over 1.67", "0 of 3 |"]
    assert rows[2][3:] == ["2,000", "30", "1.00", "3 of 3 |"]
    # A look at some rows is no proof.
    assert build_result(1, 1.0, 1.0, is_whole=False).find_goal(2.0) is None


def test_a_finished_run_is_not_repeated_and_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "one.json"
    calls: list[str] = []

    def write_result(module: str, *words: str) -> None:
        calls.append(module)
        spec = json.loads(Path(words[0]).read_text(encoding="utf-8"))
        file.write_text(json.dumps({"spec": spec, "parameters": 7, "evaluations": []}))

    monkeypatch.setattr(time_to_loss, "run_command", write_result)
    spec = {"steps": 3, "learning_rate": 1e-3}
    assert run_module("plain_loop", spec, file) == Result(7, [], 1e-3)
    assert run_module("plain_loop", spec, file).parameters == 7
    assert calls == ["tools.bench.race.plain_loop"]
    with pytest.raises(SystemExit, match=r"run with other settings\. Remove it"):
        run_module("plain_loop", {**spec, "steps": 4}, file)


def test_a_race_sweeps_rates_races_and_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def run_here(module: str, *words: str) -> None:
        calls.append(f"{module.rpartition('.')[2]} {Path(words[0]).stem}")
        if module == "tools.bench.race.rows":
            write_rows(Path(words[1]))
        elif module == "tools.bench.race.plain_loop":
            plain_loop.train(json.loads(Path(words[0]).read_text(encoding="utf-8")))

    monkeypatch.setattr(time_to_loss, "run_command", run_here)
    words = ["--quick", "--folder", str(tmp_path), "--systems", "plain-loop", "--target", "0.1"]
    assert time_to_loss.main([*words, "--seeds", "0"]) == 0
    race = "plain_loop plain-loop-0.1-4096-0"
    assert [call for call in calls if "plain-loop" in call] == [
        "plain_loop plain-loop-rate-0.0005-2048",
        "plain_loop plain-loop-rate-0.001-2048",
        race,
    ]
    calls.clear()
    assert time_to_loss.main([*words, "--seeds", "0", "1"]) == 0
    assert [call for call in calls if "plain-loop" in call] == [f"{race[:-1]}1"]
    with pytest.raises(SystemExit):
        time_to_loss.main([*words, "--tokens", "4096", "--sweep-tokens", "8192"])
    output = capsys.readouterr()
    assert "--sweep-tokens is 8192. Use 2048, a step, up to --tokens=4096." in output.err
    last = output.out.splitlines()[-1]
    assert last.startswith("| a plain loop, dense | 0.27M |")
    assert last.endswith("| 0 of 2 |")


def test_the_schedule_of_the_demo_is_scaled_to_a_budget(tmp_path: Path) -> None:
    words = scale_schedule(425_000)
    assert words == [
        "train.tokens=425000",
        "schedule.warmup_tokens=15000",
        "schedule.decay_tokens=212500",
    ]
    system = SYSTEMS["llmsys-demo"]
    assert isinstance(system, Recipe)
    spec = build_recipe_spec(Race(tmp_path, 2.0, 425_000, 1), system, 2)
    assert words == spec["words"][-3:]
    assert "run.seed=2" in spec["words"]


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- race -->\nold\n<!-- end of race -->\nb\n", encoding="utf-8")
    write_page(page, "new")
    assert page.read_text(encoding="utf-8") == ("a\n<!-- race -->\nnew\n<!-- end of race -->\nb\n")
    page.write_text("a\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="Add both lines"):
        write_page(page, "new")
