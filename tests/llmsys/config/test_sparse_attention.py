"""What the sections of an indexer and of experts in latents say of parameters, pairs and saved
tensors. test_flops.py and test_saved_tensors.py compare them with the modules.
"""

from typing import Any

import pytest

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.config.sparse_attention import SparseAttentionConfig
from llmsys.estimate.activation_memory import build_activation_shape
from tests.helpers.model_sections import EVERY_HEAD, MOE, SHAPE, SPARSE

LENGTH, SEQUENCES = 16, 2
INDEX = SparseAttentionConfig(index_topk=5, index_n_heads=3, index_head_dim=6)


def build_run(**changes: Any) -> RunConfig:
    batch = {"sequence_length": LENGTH, "sequences": SEQUENCES}
    model = ModelConfig.model_validate(SHAPE | EVERY_HEAD | changes)
    return RunConfig.model_validate(
        {"model": model, "batch": batch, "train": {"precision": "fp32"}}
    )


@pytest.mark.parametrize("phase", ["sparse", "warm_up"])
def test_pairs_are_those_that_each_query_chooses_or_sees(phase: Any) -> None:
    index = INDEX.model_copy(update={"phase": phase})
    for documents in ([1], [9, 4], [3, 5, 6]):
        seen = [t + 1 for one in documents for t in range(one)]
        chosen = [min(one, 5) for one in seen] if phase == "sparse" else seen
        assert index.count_kernel_pairs(sum(documents), documents) == sum(chosen)
        assert index.count_index_products(sum(documents), documents) == 3 * 7 * sum(seen)
    assert index.count_kernel_pairs(9, None) == 81
    assert index.count_index_products(9, None) == 3 * 7 * 81


def test_matrices_of_an_indexer_have_inputs_without_a_gradient() -> None:
    run = build_run(attention=SPARSE)
    rows = {row.name: row for row in run.model.attention.iter_parameters(run.model)}
    own = {name.rpartition("indexer.")[2]: row for name, row in rows.items() if "indexer" in name}
    assert {name: row.shape for name, row in own.items()} == {
        "q_b_proj.weight": (18, 14), "k_proj.weight": (6, 24), "weights_proj.weight": (3, 24),
        "k_norm.weight": (6,), "k_norm.bias": (6,),
    }  # fmt: skip
    assert all(row.cut_steps == (row.input == "token") for row in own.values())


def test_an_indexer_saves_a_number_for_each_pair_and_head() -> None:
    shape = build_activation_shape(build_run(attention=SPARSE), ParallelLayout(shard=1))
    saved = {one.name: one.bytes for one in INDEX.iter_saved_tensors(shape)}
    pairs = SEQUENCES * LENGTH**2
    assert saved["scores of indexer heads"] == 3 * 4 * pairs
    assert saved["scores, gradient of the indexer's loss"] == 4 * pairs


def test_tokens_visit_experts_in_latents() -> None:
    run = build_run(moe=MOE | {"latent_size": 8})
    shape, moe = build_activation_shape(run, ParallelLayout(shard=1)), run.model.moe
    assert moe is not None
    saved = {one.name: one.bytes for one in moe.iter_saved_tensors(24, shape, is_output_saved=True)}
    tokens = SEQUENCES * LENGTH
    assert saved["sorted visits"] == saved["expert outputs"] == 4 * tokens * 2 * 8
    assert saved["sum of experts in latents"] == 4 * tokens * 8
    shapes = {row.name: row.shape for row in moe.iter_parameters("moe", 24)}
    assert shapes["moe.fc1_latent_proj.weight"] == (8, 24)
    assert shapes["moe.experts.up_proj"] == (6, 8, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"residual": {"kind": "deepnorm"}}, "deepnorm has no constants for the two more"),
        ({"parametrization": {"kind": "unit_scaled"}}, "unit_scaled has no rule for the"),
    ],
    ids=str,
)
def test_what_latents_cannot_be_combined_with_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_run(moe=MOE | {"latent_size": 8}, **changes)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"layout": {"tensor": 2}}, "2 ranks share the heads whose weights the indexer"),
        ({"layout": {"context": 2}}, "2 ranks share the positions among which the indexer"),
        ({"train": {"compile": "block"}}, "block is not proven with model.attention.sparse"),
        ({"train": {"matmul_dtype": "fp8"}}, "fp8 is not proven with model.attention.sparse"),
    ],
    ids=str,
)
def test_axes_and_kernels_without_an_indexer_are_refused(
    sections: dict[str, Any], message: str
) -> None:
    run = build_run(attention=SPARSE)
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"model": run.model, "batch": run.batch} | sections)
