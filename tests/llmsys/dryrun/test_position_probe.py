"""Laws of the probe: planted tables of positions are found whatever their dimensions are, and
products of positions by widths are none.
"""

import pytest

from llmsys.config.loading.load import read_config
from llmsys.dryrun.dry_run_request import DryRunRequest
from llmsys.dryrun.position_probe import PositionProbe, ProbeAxis, find_position_probe
from llmsys.dryrun.shipped_configs import list_shipped_requests
from tests.helpers.dry_runs import LENGTH, WIDTH, run_forked, run_planted, run_tiny

PLANT = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def tabulate(self, x, *arguments, **options):
    length = x.shape[1]
    self.table = {table}
    return forward(self, x, *arguments, **options)
TransformerBlock.forward = tabulate
"""
# The sequence is as long as the model is wide.
AS_WIDE = (
    f"batch.sequence_length={WIDTH}",
    f"model.max_position_embeddings={WIDTH}",
)


@pytest.mark.parametrize(
    ("table", "overrides", "tensor"),
    [
        ("x.new_zeros(length, length)", (), f"bfloat16 [{LENGTH}, {LENGTH}]"),
        ("x.new_zeros(length, length)", AS_WIDE, f"bfloat16 [{WIDTH}, {WIDTH}]"),
        ("x @ x.mT", AS_WIDE, f"bfloat16 [1, {WIDTH}, {WIDTH}]"),
        ("x.new_zeros(length * length)", (), f"bfloat16 [{LENGTH**2}]"),
    ],
    ids=["two dimensions", "as wide as long", "a product", "flat"],
)
def test_a_planted_table_is_found(table: str, overrides: tuple[str, ...], tensor: str) -> None:
    squares = run_planted(PLANT.format(table=table), *overrides)["squares"]
    assert [one["owner"] for one in squares if one["tensor"] == tensor] == ["blocks.*"]


KEPT = """
from llmsys.model.multi_head_attention import MultiHeadAttention
forward = MultiHeadAttention.forward
def keep_mask(self, x, *arguments, **options):
    length = x.shape[1]
    if len(getattr(self, "causal", ())) < length:
        self.causal = x.new_ones(length, length, dtype=torch.bool)
    return forward(self, x, *arguments, **options)
MultiHeadAttention.forward = keep_mask
"""
BUFFER = """
from llmsys.model.multi_head_attention import MultiHeadAttention
build = MultiHeadAttention.__init__
def build_with_mask(self, *arguments, **options):
    build(self, *arguments, **options)
    mask = torch.ones({length}, {length}, dtype=torch.bool).tril()
    self.register_buffer("causal", mask, persistent=False)
MultiHeadAttention.__init__ = build_with_mask
"""


@pytest.mark.parametrize("plant", [KEPT, BUFFER.format(length=LENGTH)], ids=["kept", "buffer"])
def test_a_table_that_outlives_a_step_is_found(plant: str) -> None:
    result = run_planted(plant)
    assert [one["tensor"] for one in result["squares"]] == [f"bool [{LENGTH}, {LENGTH}]"]
    [found] = result["block_check"]["differences"]
    assert found.startswith("table of positions by positions: ")
    assert not result["is_proven"]


SCORES = """
from llmsys.model.multi_head_attention import MultiHeadAttention
forward = MultiHeadAttention.forward
def score(self, x, *arguments, **options):
    self.scores = x @ x.mT
    return forward(self, x, *arguments, **options)
MultiHeadAttention.forward = score
"""
# Attention with dropout has a mask as a table: varlen and flex attention drop nothing.
DROPS = ("model.dropout.attention=0.1",)


def test_the_tables_of_a_kernel_that_has_them_are_no_differences() -> None:
    result = run_tiny(*DROPS)
    assert {one["maker"].partition(":")[0] for one in result["squares"]} == {
        "model/attention_mask.py",
        "model/scaled_dot_product.py",
    }
    assert result["block_check"]["differences"] == []
    assert result["is_proven"]


@pytest.mark.parametrize(
    ("plant", "tensor"),
    [
        (KEPT, f"bool [{LENGTH}, {LENGTH}]"),
        (BUFFER.format(length=LENGTH), f"bool [{LENGTH}, {LENGTH}]"),
        (SCORES, f"bfloat16 [1, {LENGTH}, {LENGTH}]"),
    ],
    ids=["kept", "buffer", "scores"],
)
def test_a_table_is_found_next_to_those_of_a_kernel(plant: str, tensor: str) -> None:
    result = run_planted(plant, *DROPS)
    found = result["block_check"]["differences"]
    assert found
    assert all(
        one.startswith("table of positions by positions: ") and f" makes {tensor}" in one
        for one in found
    )
    assert not result["is_proven"]


CROSS = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def score(self, x, context, *arguments, **options):
    memory = getattr(context, "memory", None)
    if memory is not None:
        self.scores = x @ memory.hidden_BSD.mT
    return forward(self, x, context, *arguments, **options)
TransformerBlock.forward = score
"""


def test_a_table_of_targets_by_sources_is_found() -> None:
    result = run_forked(DryRunRequest("train/t5-tiny", (), 1, 2, 0, "h100-sxm"), CROSS)
    assert {one["tensor"] for one in result["squares"]} == {"bfloat16 [8, 26, 116]"}
    assert result["block_check"]["differences"]


def test_a_product_as_wide_as_long_on_a_tensor_rank_is_no_table() -> None:
    """A rank has half of 64 channels, and 32 positions: as many."""
    overrides = ("layout.tensor=2", f"model.intermediate_size={2 * LENGTH}")
    result = run_tiny(*overrides)
    assert result["probe_length"] is not None
    assert result["squares"] == []


def test_the_probe_is_the_longest_multiple_of_a_prime_that_no_width_has() -> None:
    config = read_config("train/llama-8b-64xh100", ["layout.tensor=8", "layout.context=2"]).run
    layout = config.resolve_layout(64)
    probe = find_position_probe(config, layout)
    axis = ProbeAxis(16 * 509, 509, 8192)
    assert probe == PositionProbe(axis, axis)


def test_shapes_are_those_of_the_whole_sequence() -> None:
    axis = ProbeAxis(length=62, prime=31, full_length=64)
    probe = PositionProbe(axis, axis)
    assert probe.scale_shape((2, 62, 31, 96)) == (2, 64, 32, 96)
    assert probe.is_table((2, 62, 31))
    assert probe.is_table((62 * 62,))
    assert not probe.is_table((62, 96, 4096))


def test_source_and_target_have_a_prime_each() -> None:
    probe = PositionProbe(ProbeAxis(113, 113, 116), ProbeAxis(23, 23, 26))
    assert probe.is_table((2, 23, 113))
    assert probe.is_table((113, 113))
    assert probe.is_table((23 * 113,))
    assert not probe.is_table((2, 23, 64))
    assert probe.scale_shape((2, 23, 113)) == (2, 26, 116)


def test_both_streams_together_have_their_own_length() -> None:
    probe = PositionProbe(ProbeAxis(6 * 17, 17, 108), ProbeAxis(7 * 17, 17, 126))
    assert probe.scale_shape((8, 1, 7 * 17, 6 * 17)) == (8, 1, 126, 108)


@pytest.mark.parametrize("request_", list_shipped_requests(), ids=lambda one: one.config)
def test_every_training_config_without_recurrent_layers_has_a_probe(request_) -> None:
    run = read_config(request_.config, []).run
    batch = run.batch.model_copy(update={"micro_sequences": 1})
    run = run.model_copy(update={"batch": batch})
    probe = find_position_probe(run, run.resolve_layout(request_.world_size))
    assert (probe is None) == (run.model.rnn is not None)
    if probe is not None:
        assert all(
            most / 2 < length <= most
            for length, most in zip(probe.lengths, run.sequence_lengths, strict=True)
        )
