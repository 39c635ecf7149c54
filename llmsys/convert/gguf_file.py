"""Export a run as one GGUF file, which llama.cpp, Ollama and LM Studio load.

Reads a run folder or a checkpoint, as the export to Hugging Face does. Writes model.gguf.

Names and keys are those of the library `gguf`; the order of channels is that of llama.cpp's
convert_hf_to_gguf.py.

Invariants:
- Memory stays near the largest tensor, of experts near those of one layer.
- A model that llama.cpp would compute otherwise is rejected before anything is written.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.position import Llama3RopeScalingConfig
from llmsys.convert.conversion_plan import TensorGroup
from llmsys.convert.folders import publish_folder
from llmsys.convert.gguf_tokenizer import read_gguf_tokenizer
from llmsys.convert.to_hugging_face import HuggingFaceExport
from llmsys.errors import ConfigError
from llmsys.progress import Progress

FILE_NAME = "model.gguf"
_BIASES = ("attn_q", "attn_k", "attn_v")
_EXPERT = re.compile(
    r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight"
)
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class _Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: its name there.
        biases: stems of tensors that may have a bias.
        feed_forward: kind of the dense layers and experts.
        neighbours: whether RoPE rotates neighbouring channels, so that rows of queries and keys are
            reordered.
        norm_topk: whether weights of the chosen experts are divided by their sum.
    """

    name: str
    biases: tuple[str, ...] = ()
    feed_forward: str = "swiglu"
    neighbours: bool = False
    norm_topk: bool = True


_LLAMA = _Architecture(
    "llama", (*_BIASES, "attn_output", "ffn_gate", "ffn_up", "ffn_down"), neighbours=True
)  # fmt: skip
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _Architecture("qwen2", _BIASES),
    "qwen3": _Architecture("qwen3"),
    "qwen2_moe": _Architecture("qwen2moe", _BIASES, norm_topk=False),
    "qwen3_moe": _Architecture("qwen3moe"),
    "olmo2": _Architecture("olmo2"),
    "olmoe": _Architecture("olmoe", norm_topk=False),
    "gemma2": _Architecture("gemma2", feed_forward="geglu_tanh"),
}


@dataclass(frozen=True)
class _Part:
    """A tensor of a group of the export, by its number in the group."""

    group: TensorGroup
    number: int


def convert_to_gguf(source: Path, destination: Path, dtype: str | None = None) -> Path:
    """Write the weights and the tokenizer of a run as GGUF.

    Args:
        source: run folder or checkpoint.
        destination: folder to create, for model.gguf.
        dtype: dtype of matrices, as for Hugging Face; vectors and routers are float32. None: that
            of the checkpoint.

    Returns:
        The file.

    Raises:
        ConfigError: llama.cpp has no such model or tokenizer, or `gguf` is not installed. Nothing
            was written.
    """
    gguf = _import_gguf()
    export = HuggingFaceExport(source, None, dtype)
    kind = _choose_architecture(export)
    sources = _list_sources(export, kind, gguf)
    tokenizer = read_gguf_tokenizer(export.run)
    with publish_folder(destination) as folder:
        writer = gguf.GGUFWriter(folder / FILE_NAME, kind.name)
        _add_model_keys(writer, export.model, kind, gguf)
        tokenizer.add_keys(writer)
        _write_tensors(writer, export, kind, sources, gguf)
        writer.close()
    return destination / FILE_NAME


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            "--to gguf needs the package gguf, which is not installed. Install it with: pip "
            "install 'llmsys[gguf]'."
        ) from None
    return gguf


def _choose_architecture(export: HuggingFaceExport) -> _Architecture:
    model, model_type = export.model, str(export.values["model_type"])
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"--to gguf: model_type {model_type!r} is not written as GGUF. Written are "
            f"{', '.join(ARCHITECTURES)}; use the export to Hugging Face: llmsys convert "
            f"{export.run_folder} FOLDER"
        )
    kind = ARCHITECTURES[model_type]
    if violation := next(_find_violations(model, model_type, kind), None):
        raise ConfigError(f"--to gguf: llama.cpp's {kind.name} cannot compute {violation}")
    return kind


def _find_violations(model: ModelConfig, model_type: str, kind: _Architecture) -> Iterator[str]:
    """Yield what llama.cpp would compute otherwise, and the remedy."""
    remedy = "Export to Hugging Face's format instead, without --to."
    position, moe, layers = model.position, model.moe, range(model.num_hidden_layers)
    if position.kind != "rope" or position.fraction != 1 or not all(map(model.uses_rope, layers)):
        yield f"model.position other than RoPE over whole heads in all layers. {remedy}"
    elif position.scaling.kind not in ("none", "llama3") or (
        position.scaling.kind == "llama3" and not kind.neighbours
    ):
        yield f"model.position.scaling.kind={position.scaling.kind}. {remedy}"
    windows = [model.get_attention_window(layer) is not None for layer in layers]
    if windows != [kind.name == "gemma2" and layer % 2 == 0 for layer in layers]:
        yield f"model.sliding_window={model.sliding_window} in these layers. {remedy}"
    if (found := moe.expert.kind if moe else model.feed_forward.kind) != kind.feed_forward:
        yield f"a feed-forward of kind {found}; it has {kind.feed_forward}. {remedy}"
    if (
        getattr(model.attention, "clip", None) is not None
        or getattr(model.attention, "scale", None) is not None
    ):
        yield f"model.attention.clip or model.attention.scale. {remedy}"
    caps = (getattr(model.attention, "logit_softcap", None), getattr(model.head, "softcap", None))
    if kind.name == "gemma2" and None in caps:
        yield (
            "a soft cap of null (model.attention.logit_softcap, model.head.softcap): it has "
            f"defaults. {remedy}"
        )
    if moe is None:
        return
    if model.num_dense_layers:
        yield f"{model.num_dense_layers} dense layers among layers with experts. {remedy}"
    if moe.norm_topk_prob != kind.norm_topk and model_type != "mixtral":
        yield f"model.moe.norm_topk_prob={str(moe.norm_topk_prob).lower()}. {remedy}"


def _list_sources(
    export: HuggingFaceExport, kind: _Architecture, gguf: Any
) -> dict[str, list[_Part]]:
    """Return the parts of each tensor of the file; a stack of experts has one for each expert."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name)
    names = gguf.get_tensor_name_map(arch, export.model.num_hidden_layers)
    sources: dict[str, list[_Part]] = {}
    for group in export.plan.groups:
        for number, theirs in enumerate(group.theirs):
            expert = _EXPERT.fullmatch(theirs)
            module = f"{expert[1]}.{expert[3]}.weight" if expert else theirs
            found = names.get_name(module, try_suffixes=(".weight", ".bias"))
            if found is None and expert:
                block = expert[1].replace("block_sparse_moe", "mlp")
                stem = f"{block}.{_MIXTRAL.get(expert[3], expert[3])}.weight"
                found = names.get_name(stem, try_suffixes=(".weight",))
            if found is None or (
                found.endswith(".bias") and found.split(".")[-2] not in kind.biases
            ):
                raise ConfigError(
                    f"--to gguf: llama.cpp's {kind.name} has no tensor for {theirs}. Export to "
                    "Hugging Face's format instead, without --to."
                )
            sources.setdefault(found, []).append(_Part(group, number))
    return sources


def _add_model_keys(writer: Any, model: ModelConfig, kind: _Architecture, gguf: Any) -> None:
    assert model.position.kind == "rope"
    writer.add_name("llmsys")
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_hidden_layers)
    writer.add_head_count(model.num_attention_heads)
    writer.add_head_count_kv(model.num_key_value_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.norm.eps)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.position.theta)
    writer.add_feed_forward_length(
        model.intermediate_size or (model.moe.moe_intermediate_size if model.moe else 0)
    )
    if model.moe is not None:
        writer.add_expert_count(model.moe.num_experts)
        writer.add_expert_used_count(model.moe.num_experts_per_tok)
        if kind.name in ("qwen2moe", "qwen3moe"):
            writer.add_expert_feed_forward_length(model.moe.moe_intermediate_size)
        if model.moe.shared_expert_size:
            writer.add_expert_shared_feed_forward_length(model.moe.shared_expert_size)
    if kind.name == "gemma2":
        writer.add_sliding_window(model.sliding_window)
        for value, add in (
            (getattr(model.attention, "logit_softcap", None), writer.add_attn_logit_softcapping),
            (getattr(model.head, "softcap", None), writer.add_final_logit_softcapping),
        ):
            if value is not None:
                add(value)


def _write_tensors(
    writer: Any,
    export: HuggingFaceExport,
    kind: _Architecture,
    sources: dict[str, list[_Part]],
    gguf: Any,
) -> None:
    dtypes, plan = (
        gguf.GGMLQuantizationType,
        {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    )
    extra = _compute_rope_factors(export.model)
    if extra is not None:
        writer.add_tensor_info("rope_freqs.weight", extra.shape, extra.dtype, extra.nbytes)
    sizes = {}
    for name, parts in sources.items():
        shape = parts[0].group.their_shapes[parts[0].number]
        # Without sides of 1, as llama.cpp writes the gate of a shared expert.
        shape = (
            (len(parts), *shape) if "_exps" in name else tuple(side for side in shape if side > 1)
        )
        ours = (
            export.reader.dtypes[parts[0].group.ours[0].name]
            if export.dtype is None
            else export.dtype
        )
        needs_float32 = len(shape) == 1 or "ffn_gate_inp" in name
        dtype = dtypes.F32 if needs_float32 else dtypes[plan[ours]]
        sizes[name] = dtype
        width = 4 if dtype == dtypes.F32 else 2
        writer.add_tensor_info(
            name, shape, np.dtype(np.float32), width * int(np.prod(shape)), raw_dtype=dtype
        )
    writer.add_file_type(int(_choose_file_type(set(sizes.values()), gguf)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if extra is not None:
        writer.write_tensor_data(extra)
    read = _build_group_reader(export)
    with Progress("convert", total=len(sources), unit="tensor") as progress:
        for name, parts in sources.items():
            tensors = [read(part.group)[part.number] for part in parts]
            tensor = torch.stack(tensors) if "_exps" in name else tensors[0]
            values = _transform_tensor(name, tensor.float(), export.model, kind).numpy()
            writer.write_tensor_data(
                gguf.quants.quantize(np.ascontiguousarray(values), sizes[name])
            )
            progress.advance(1)


def _build_group_reader(export: HuggingFaceExport) -> Callable[[TensorGroup], list[Tensor]]:
    """Return a function that reads the tensors of a group, and keeps those of the last one."""
    latest: list[tuple[TensorGroup, list[Tensor]]] = []

    def read_group(group: TensorGroup) -> list[Tensor]:
        if not latest or latest[0][0] is not group:
            latest[:] = [(group, export.read_group(group))]
        return latest[0][1]

    return read_group


def _transform_tensor(name: str, tensor: Tensor, model: ModelConfig, kind: _Architecture) -> Tensor:
    """Return a tensor in llama.cpp's order of channels and with its offset of norms."""
    stem = name.split(".")[-2]
    if kind.neighbours and stem in ("attn_q", "attn_k"):
        heads = model.num_attention_heads if stem == "attn_q" else model.num_key_value_heads
        # Halves of a head become neighbours.
        halves = tensor.reshape(heads, 2, model.head_dim // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if kind.name == "gemma2" and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _compute_rope_factors(model: ModelConfig) -> npt.NDArray[np.float32] | None:
    """Return the divisor of each frequency under Llama 3's scaling; None without scaling."""
    assert model.position.kind == "rope"
    scaling = model.position.scaling
    if not isinstance(scaling, Llama3RopeScalingConfig):
        return None
    lengths = 2 * pi * model.position.theta ** (np.arange(0, model.head_dim, 2) / model.head_dim)
    old, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    smooth = np.clip((old / lengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)


def _choose_file_type(dtypes: set[Any], gguf: Any) -> Any:
    """Return the type that most tensors have."""
    if gguf.GGMLQuantizationType.F16 in dtypes:
        return gguf.LlamaFileType.MOSTLY_F16
    if gguf.GGMLQuantizationType.BF16 in dtypes:
        return gguf.LlamaFileType.MOSTLY_BF16
    return gguf.LlamaFileType.ALL_F32
