"""Laws of the verdict over a matrix of layouts and faults: each fault that is planted in a layout
ends its dry run with status 1 and is named, and no layout without one does.

The runs of a layout plant faults that do not touch each other together: each must be named.
"""

import re

import pytest

from llmsys.errors import RefutedStepError
from tests.helpers.dry_runs import EXPERTS, run_planted


def set_length(tokens: int) -> tuple[str, str]:
    return f"batch.sequence_length={tokens}", f"model.max_position_embeddings={tokens}"


LATENT = (
    "model.attention.kind=latent",
    "model.attention.kv_lora_rank=16",
    "model.attention.qk_nope_head_dim=8",
    "model.attention.qk_rope_head_dim=4",
    "model.attention.v_head_dim=8",
)
INTERLEAVED = (
    "layout.pipeline=2",
    "layout.pipeline_schedule.kind=interleaved",
    "layout.pipeline_schedule.stages_per_rank=2",
    "model.num_hidden_layers=4",
)
RING = ("layout.context=2", "layout.context_kind=ring", *set_length(256))
LAYOUTS: dict[str, tuple[tuple[str, ...], int]] = {
    "zero1": (
        (
            "engine.data_parallel=plain",
            "batch.sequences=32",
            "train.activation_checkpoint=selective",
        ),
        3,
    ),
    "ddp": (
        ("engine.data_parallel=ddp", "train.activation_checkpoint=full", "batch.sequences=32"),
        6,
    ),
    "hsdp-whole-never": (
        ("layout.replicate=4", "engine.reshard=never", "engine.gradient_accumulation=whole"),
        5,
    ),
    "hsdp-after-step": (
        ("layout.replicate=2", "engine.reshard=after_step", "batch.sequences=32"),
        6,
    ),
    "offload-bf16": (("engine.cpu_offload=state", "engine.reduce_dtype=bf16"), 2),
    "tensor-gqa": (
        (
            "layout.tensor=4",
            "model.num_key_value_heads=2",
            "train.activation_checkpoint=full",
            "engine.reshard=never",
        ),
        6,
    ),
    "ulysses-after-step": (("layout.context=4", "engine.reshard=after_step", *set_length(64)), 3),
    "ring-hsdp": ((*RING, "layout.replicate=2"), 5),
    "tensor-ring": ((*RING, "layout.tensor=2", "engine.gradient_accumulation=whole"), 6),
    "gpipe": (
        (
            "layout.pipeline=4",
            "layout.pipeline_schedule.kind=gpipe",
            "model.num_hidden_layers=4",
            "batch.sequences=8",
        ),
        5,
    ),
    "interleaved-expert": ((*INTERLEAVED, *EXPERTS, "layout.expert=2", "batch.sequences=16"), 7),
    "pipeline-tensor-ulysses": (
        (
            "layout.pipeline=2",
            "layout.context=2",
            "layout.tensor=2",
            "batch.sequences=4",
            *set_length(64),
        ),
        6,
    ),
    "expert": ((*EXPERTS, "layout.expert=8", "train.activation_checkpoint=selective"), 6),
    "expert-tensor-latent": ((*EXPERTS, *LATENT, "layout.expert=4", "layout.tensor=2"), 1),
}
HAS_EXPERTS = ("interleaved-expert", "expert", "expert-tensor-latent")
HAS_STAGES = ("gpipe", "interleaved-expert", "pipeline-tensor-ulysses")

ITEM = """
from llmsys.model.transformer_block import TransformerBlock
branch = TransformerBlock.run_feed_forward_branch
def check_first(self, x, context):
    assert bool(x.isfinite().all())
    return branch(self, x, context)
TransformerBlock.run_feed_forward_branch = check_first
"""
CLIP_ITEM = """
from llmsys.engine import torch_engine
clip = torch_engine.clip_gradients
def print_norm(*arguments, **options):
    norm = clip(*arguments, **options)
    float(norm)
    return norm
torch_engine.clip_gradients = print_norm
"""
TABLES = """
from llmsys.model.transformer_block import TransformerBlock
attend = TransformerBlock.run_attention_branches
def tabulate(self, x, context):
    places = torch.arange(x.shape[1], device=x.device)
    hidden = places[:, None] < places[None]
    self.kept = hidden, x.new_zeros(5, *hidden.shape).masked_fill_(hidden, -1e4)
    return attend(self, x, context)
TransformerBlock.run_attention_branches = tabulate
"""
PADDING = """
from llmsys.model.experts import GroupedExperts
forward = GroupedExperts.forward
def pad_each(self, x_MD, counts_E):
    rows = 16 * len(counts_E)
    padded_MD = torch.nn.functional.pad(x_MD, (0, 0, 0, rows))
    return forward(self, padded_MD, counts_E + 16)[: len(x_MD)]
GroupedExperts.forward = pad_each
"""
# The gradient norm of a half of the ranks.
NORM_ASTRAY = """
from llmsys.dryrun import rank_session
from llmsys.parallel import gradient_clipping
half = []
build = rank_session.build_device_meshes
def build_with_half(*arguments):
    first = torch.distributed.get_rank() // 4 * 4
    half.append(torch.distributed.new_group([*range(first, first + 4)]))
    return build(*arguments)
rank_session.build_device_meshes = build_with_half
def sum_over_half(tensor):
    torch.distributed.all_reduce(tensor, group=half[0])
    return tensor
gradient_clipping.all_reduce_sum = sum_over_half
"""
OWN_COUNTS = """
from llmsys.engine import engine
engine.all_reduce_sum = lambda tensor: tensor
"""
UNREDUCED_BLOCK = """
from llmsys.parallel.fsdp import FsdpModel, FSDPModule
enter = FsdpModel.enter_micro_batch
def enter_without_a_block(self, *, last, stage=None):
    found = enter(self, last=last, stage=stage)
    for name, module in self._model.named_modules():
        if name.startswith("blocks.") and isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(False, recurse=False)
    return found
FsdpModel.enter_micro_batch = enter_without_a_block
"""
UNREDUCED_DDP = """
from llmsys.parallel.ddp import DdpModel
DdpModel.enter_micro_batch = lambda self, *, last, stage=None: self._ddp.no_sync()
"""
GATHERED_TWICE = """
from llmsys.model.transformer_block import TransformerBlock
forward = TransformerBlock.forward
def gather_again(self, *arguments, **options):
    if torch._C._current_graph_task_id() == -1:
        for group in self._get_fsdp_state()._fsdp_param_groups:
            group._to_sharded()  # reshard() does nothing where a forward keeps weights
        self.unshard()
    return forward(self, *arguments, **options)
TransformerBlock.forward = gather_again
"""
PUBLISHED_TWICE = """
from llmsys.parallel.plain import PlainModel
prepare = PlainModel.prepare_weights
def prepare_twice(self):
    prepare(self)
    self._is_stale = True
    prepare(self)
PlainModel.prepare_weights = prepare_twice
"""
WHOLE_NORM = """
from llmsys.parallel import parallelize
shard = parallelize.fully_shard
def shard_all_but_norms(module, **options):
    named = module.named_parameters()
    kept = {one for name, one in named if name.endswith("feed_forward_norm.weight")}
    return shard(module, **options, ignored_params=kept)
parallelize.fully_shard = shard_all_but_norms
"""
WHOLE_MASTERS = """
from dataclasses import replace
from torch.distributed.device_mesh import DeviceMesh
from llmsys.engine import torch_engine
build = torch_engine.PlainModel
def build_alone(model, meshes, **options):
    own = DeviceMesh("cuda", [torch.distributed.get_rank()])
    return build(model, replace(meshes, replica=own), **options)
torch_engine.PlainModel = build_alone
"""
SKIPPED = """
from llmsys.model.layer_stack import LayerStack
select = LayerStack.select_blocks
LayerStack.select_blocks = lambda self, layers: select(self, layers)[:-1]
"""
SKIPPED_BRANCH = """
from llmsys.model.transformer_block import TransformerBlock
TransformerBlock.run_feed_forward_branch = lambda self, x, context: x
"""
WORLD = r"over world \(8 ranks: 0, 1, 2, 3, …\), float32"
ITEM_NAMED = "wait of the host in a block: item in blocks"
CLIP_NAMED = "wait of the host outside of blocks: item"
NORM_NAMED = rf"missing: all_reduce {WORLD}, 4 bytes"
HALF_NAMED = r"additional: all_reduce over .* \(4 ranks: .*\), float32, 4 bytes"


def judge(plant: str, layout: str) -> tuple[int, str]:
    """Return the exit status of the dry run of a rank, and what it names."""
    overrides, rank = LAYOUTS[layout]
    try:
        result = run_planted(plant, *overrides, rank=rank)
    except RefutedStepError as refuted:
        return refuted.exit_status, str(refuted)
    assert result["fits"]
    found = [*result["collective_check"]["differences"], *result["block_check"]["differences"]]
    assert result["is_proven"] is not bool(found)
    return 1 - result["is_proven"], "\n".join(found)


def list_missed(plants: dict[str, list[str]], layout: str) -> list[str]:
    """Plant faults together, and return what is not named of them; with the status, if it is 0."""
    status, text = judge("\n".join(plants), layout)
    wanted = [one for named in plants.values() for one in named]
    missed = [one for one in wanted if not re.search(one, text)]
    return [*missed, *(["status 1"] if status != 1 else [])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_without_a_fault_has_a_difference(layout: str) -> None:
    assert judge("", layout) == (0, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wasted_work_is_named_in_every_layout(layout: str) -> None:
    """A read of the host, tables of positions by positions, and rows of experts that nobody
    routed.
    """
    table = r"table of positions by positions: blocks\.\* makes "
    plants = {
        ITEM: [ITEM_NAMED],
        TABLES: [table + r"bool \[(\d+), \1\]", table + r"bfloat16 \[5, (\d+), \1\]"],
    }
    if layout in HAS_EXPERTS:
        plants[PADDING] = [r"unneeded products: blocks\.\*\.feed_forward\.experts .* are padding"]
    assert list_missed(plants, layout) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_messages_are_named_in_every_layout(layout: str) -> None:
    """A sum over the wrong group, one that is missing, a second gather, and a read of the host."""
    counts = [rf"missing: all_reduce {WORLD}, 16 bytes", rf"missing: all_reduce {WORLD}, 12 bytes"]
    plants = {NORM_ASTRAY: [NORM_NAMED, HALF_NAMED], OWN_COUNTS: counts}
    if layout != "offload-bf16":  # whose norm is on the host
        plants[CLIP_ITEM] = [CLIP_NAMED]
    if layout == "zero1":
        plants[PUBLISHED_TWICE] = [r"all_gather over world .*, bfloat16, .* bytes, expected"]
    elif layout != "ddp":
        plants[GATHERED_TWICE] = [r"too many: all_gather over .*, bfloat16, "]
    assert list_missed(plants, layout) == []


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "zero1"])
def test_gradients_of_blocks_that_no_rank_sums_are_named(layout: str) -> None:
    if layout == "ddp":
        plants = {UNREDUCED_DDP: [rf"all_reduce {WORLD}, rest of the step: 0 bytes, expected"]}
    else:
        plants = {UNREDUCED_BLOCK: [r"(missing|too few): reduce_scatter over "]}
    assert list_missed(plants, layout) == []


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ddp"])
def test_tensors_that_are_not_sharded_are_named(layout: str) -> None:
    if layout == "zero1":
        # The embedding: 4,096 × 64.
        held = r"/embed\.weight holds 262,144 elements on this rank, expected 32,768"
        kinds = ("parameter", "first_moment", "second_moment")
        plants = {WHOLE_MASTERS: [f"wrong shard: {kind}{held}" for kind in kinds]}
    else:
        plants = {WHOLE_NORM: [r"wrong shard: blocks\.\d\.feed_forward_norm\.weight holds 64 "]}
    assert list_missed(plants, layout) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_of_a_stage_that_does_not_run_is_named(layout: str) -> None:
    """A whole stage of a pipeline; without one, the feed-forwards of all blocks."""
    if layout in HAS_STAGES:
        plants = {SKIPPED: [r"skipped block: blocks\.\d runs \d+ times in the forward passes"]}
    else:
        # DDP itself refuses a backward pass that lacks parameters.
        named = r"too few products: blocks\.\*\.feed_forward|Expected to mark a variable ready"
        plants = {SKIPPED_BRANCH: [named]}
    assert list_missed(plants, layout) == []


@pytest.mark.parametrize("length", [96, 128, 192, 256])
@pytest.mark.parametrize("layout", ["hsdp-after-step", "tensor-gqa", "pipeline-tensor-ulysses"])
def test_tables_of_every_size_are_named(layout: str, length: int) -> None:
    """The length alone, and equal to the widths of a rank's shards; a rank of a sequence has the
    rows and columns of its own positions.
    """
    overrides, rank = LAYOUTS[layout]
    result = run_planted(TABLES, *overrides, *set_length(length), rank=rank)
    own = length // (4 if "layout.tensor" in " ".join(overrides) else 1)
    text = "\n".join(result["block_check"]["differences"])
    for shape in (f"bool [{own}, {own}]", f"bfloat16 [5, {own}, {own}]"):
        assert f"blocks.* makes {shape}, " in text
    assert not result["is_proven"]
