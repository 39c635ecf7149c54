"""A run as GGUF: transformers reads the same logits and token ids from it, and what llama.cpp
lacks is refused.
"""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from llmsys.config.loading.load import load_run_config
from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.convert.gguf_file import ARCHITECTURES, convert_to_gguf
from llmsys.errors import ConfigError
from llmsys.launch.main import main
from llmsys.train.run_data import load_run_tokenizer
from tests.helpers.json_tokenizers import write
from tests.helpers.tiny_crawl import write_sentences
from tests.helpers.transformers_models import EXPERTS, LLAMA, LOCAL_EXPERTS

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

ROWS = 420
SHARED = {"shared_expert_intermediate_size": 20, "norm_topk_prob": False}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mixtral": ("Mixtral", LOCAL_EXPERTS | {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | SHARED),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"head_dim": 8, "norm_topk_prob": True}),
    "olmo2": ("Olmo2", {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
}
# transformers reads no GGUF of these: the tensors are compared with the model's.
NOT_READ = {"mixtral", "olmo2", "olmoe"}
# Its reader has no key for one of their sizes or biases.
NEEDS_CONFIG = {"llama", "qwen3", "qwen2_moe", "qwen3_moe", "gemma2"}


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(write_sentences(random.Random(1), 200)), model_writer=model,
        vocab_size=400,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=["<|user|>"],
    )  # fmt: skip
    return model.getvalue()


def save_model(folder: Path, name: str, **changes: Any) -> Any:
    stem, values = FAMILIES[name]
    config = getattr(transformers, f"{stem}Config")(
        **LLAMA | values | {"vocab_size": ROWS} | changes
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


def convert(tmp_path: Path, tokenizer: bytes | None, *words: str) -> Any:
    """Import the folder `theirs`, export it as GGUF, and return the library's reader."""
    if tokenizer is not None:
        (tmp_path / "theirs" / "tokenizer.model").write_bytes(tokenizer)
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "run")
    assert (
        main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "gguf", *words]) == 0
    )
    return gguf.GGUFReader(tmp_path / "out" / "model.gguf")


def read_tensors(reader: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}


@pytest.mark.parametrize("name", FAMILIES)
def test_another_program_computes_the_same_logits(
    name: str, tmp_path: Path, tokenizer: bytes
) -> None:
    theirs = save_model(tmp_path / "theirs", name)
    tensors = read_tensors(convert(tmp_path, tokenizer))
    if name in NOT_READ:
        compare_tensors(
            tensors, {key: value.numpy() for key, value in theirs.state_dict().items()}, name
        )
        return
    given = {"config": theirs.config} if name in NEEDS_CONFIG else {}
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", **given
    ).eval()
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)


def compare_tensors(tensors: dict[str, Any], expected: dict[str, Any], name: str) -> None:
    """Compare some tensors by their names in llama.cpp's sources."""
    layer, experts = "model.layers.1", "model.layers.1.mlp.experts"
    assert np.array_equal(tensors["output_norm.weight"], expected["model.norm.weight"])
    assert np.array_equal(
        tensors["blk.1.attn_v.weight"], expected[f"{layer}.self_attn.v_proj.weight"]
    )
    queries = expected[f"{layer}.self_attn.q_proj.weight"]
    if name == "mixtral":  # rows of a head: 0, d/2, 1, d/2 + 1, …
        head = queries[4:8]
        assert np.array_equal(tensors["blk.1.attn_q.weight"][4:8], head[[0, 2, 1, 3]])
    else:
        assert np.array_equal(tensors["blk.1.attn_q.weight"], queries)
    if name == "olmo2":
        assert np.array_equal(
            tensors["blk.1.post_ffw_norm.weight"],
            expected[f"{layer}.post_feedforward_layernorm.weight"],
        )
        return
    fused = expected[f"{experts}.gate_up_proj"]
    half = fused.shape[1] // 2
    assert np.array_equal(tensors["blk.1.ffn_gate_exps.weight"], fused[:, :half])
    assert np.array_equal(tensors["blk.1.ffn_up_exps.weight"], fused[:, half:])
    assert np.array_equal(tensors["blk.1.ffn_down_exps.weight"], expected[f"{experts}.down_proj"])
    assert np.array_equal(
        tensors["blk.1.ffn_gate_inp.weight"], expected[f"{layer}.mlp.gate.weight"]
    )


def test_scaled_frequencies_are_divided_as_transformers_does(
    tmp_path: Path, tokenizer: bytes
) -> None:
    theirs = save_model(tmp_path / "theirs", "llama", rope_parameters=LLAMA3, head_dim=16)
    factors = read_tensors(convert(tmp_path, tokenizer))["rope_freqs.weight"]
    plain = 10000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(plain / factors, theirs.model.rotary_emb.inv_freq.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "kind", "bound"), [("bfloat16", "BF16", 2**-8), ("float16", "F16", 2**-11)]
)
def test_matrices_have_the_asked_dtype_and_vectors_float32(
    dtype: str, kind: str, bound: float, tmp_path: Path, tokenizer: bytes
) -> None:
    theirs = save_model(tmp_path / "theirs", "qwen3_moe").state_dict()
    reader = convert(tmp_path, tokenizer, "--dtype", dtype)
    types = {one.name: one.tensor_type.name for one in reader.tensors}
    assert types["blk.0.ffn_up_exps.weight"] == types["token_embd.weight"] == kind
    assert types["blk.0.attn_norm.weight"] == types["blk.0.ffn_gate_inp.weight"] == "F32"
    found, exact = read_tensors(reader)["output.weight"], theirs["lm_head.weight"].numpy()
    assert 0 < np.abs(found - exact).max() <= bound * np.abs(exact).max()


def read_key(reader: Any, name: str) -> Any:
    return reader.fields[f"tokenizer.ggml.{name}"].contents()


def test_a_trained_tokenizer_has_its_pieces_scores_and_the_prompt_of_training(
    tmp_path: Path, tokenizer: bytes
) -> None:
    save_model(tmp_path / "theirs", "llama")
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages }}")
    reader = convert(tmp_path, tokenizer)
    library = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    size = library.vocab_size()
    assert read_key(reader, "model") == "llama"
    assert read_key(reader, "tokens")[:size] == [library.id_to_piece(i) for i in range(size)]
    assert len(read_key(reader, "tokens")) == ROWS
    assert read_key(reader, "scores")[:size] == [library.get_score(i) for i in range(size)]
    types = read_key(reader, "token_type")
    assert types[library.piece_to_id("<|user|>")] == 4
    assert [
        types[i]
        for i in (library.unk_id(), library.bos_id(), library.piece_to_id("<0x0A>"), size - 1)
    ] == [
        2,
        3,
        6,
        1,
    ]
    assert types[size:] == [5] * (ROWS - size)
    assert (read_key(reader, "add_bos_token"), read_key(reader, "bos_token_id")) == (
        True,
        library.bos_id(),
    )
    assert read_key(reader, "add_space_prefix") is False
    assert reader.fields["tokenizer.chat_template"].contents() == "{{ messages }}"


@pytest.mark.parametrize(
    ("kind", "model", "pattern"),
    [
        ("gpt2", "gpt2", "gpt-2"),
        ("llama3", "gpt2", "llama-bpe"),
        ("qwen2", "gpt2", "qwen2"),
        ("mistral", "llama", "default"),
    ],
)
def test_a_published_tokenizer_gives_the_ids_of_the_run(
    kind: str, model: str, pattern: str, tmp_path: Path
) -> None:
    save_model(tmp_path / "theirs", "llama" if model == "llama" else "qwen2")
    write(kind, tmp_path / "theirs")
    reader = convert(tmp_path, None)
    assert (read_key(reader, "model"), read_key(reader, "pre")) == (model, pattern)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    ours = load_run_tokenizer(load_run_config(str(tmp_path / "run" / "config.yaml")))
    for text in ("The lazy dog, 1871: naïve 漢字", "it's  the end\n"):
        assert read(text, add_special_tokens=False)["input_ids"] == ours.encode(text)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("bert", "is a WordPiece model, and llama.cpp reads BPE"), ("t5", "Unigram")],
)
def test_tokenizers_of_other_kinds_are_refused(kind: str, message: str, tmp_path: Path) -> None:
    save_model(tmp_path / "theirs", "llama")
    write(kind, tmp_path / "theirs")
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        convert_to_gguf(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"attn_logit_softcapping": None}, "gemma2 cannot compute a soft cap of null"),
        (
            "mistral",
            {"sliding_window": 8},
            r"llama cannot compute model.sliding_window=8 in these layers",
        ),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}},
            "scaling.kind=yarn",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "model.moe.norm_topk_prob=false"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "1 dense layers among layers with experts"),
        (
            "qwen3",
            {"attention_bias": True},
            "llama.cpp's qwen3 has no tensor for model.layers.0.self_attn.q_proj.bias",
        ),
        ("llama", {"hidden_act": "gelu"}, "a feed-forward of kind geglu; it has swiglu"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, tokenizer: bytes
) -> None:
    save_model(tmp_path / "theirs", name, **changes)
    (tmp_path / "theirs" / "tokenizer.model").write_bytes(tokenizer)
    convert_from_hugging_face(tmp_path / "theirs", tmp_path / "run")
    with pytest.raises(ConfigError, match=message):
        convert_to_gguf(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_families_and_folders_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "gemma2" in ARCHITECTURES
    save_model(tmp_path / "theirs", "llama")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "out"), "--to", "gguf"]) == 2
    assert "is a Hugging Face folder. Import it first: llmsys convert" in capsys.readouterr().err
