"""Every variant of every tagged union in RunConfig, and the smallest settings that choose it.

`tests/test_every_variant.py` walks them. A new variant needs one line in EXAMPLES.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel

from llmsys.config.run import RunConfig
from llmsys.config.section import fill_default_kinds, get_kind, list_section_types
from tests.helpers.paths import ROOT

Settings = dict[str, Any]
TEMPLATES = ROOT / "launch" / "commands" / "templates"

# T positions of a window and of a source; two steps of two windows fill the budget several times
# over.
LENGTH = 16
MODEL: Settings = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,  # wide enough that activations and routers leave their linear range
}
MOE: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
RUN: Settings = {
    "model": MODEL,
    "tokenizer": {"vocab_size": 300},
    "batch": {"sequence_length": LENGTH, "sequences": 2},
    "train": {"tokens": 16 * 2 * LENGTH, "precision": "fp32"},
}


@dataclass(frozen=True)
class ConfigVariant:
    """One member of a tagged union, at one place of the config."""

    path: str  # keys joined by dots; [] is an entry of a list
    kind: str

    @property
    def is_trained(self) -> bool:
        """Whether the training of a model depends on it; else the preparation of data does."""
        return self.path.split(".")[0] in ("model", "objective", "optimizer", "schedule", "engine")

    def __str__(self) -> str:
        return f"{self.path}.kind={self.kind}"


def iter_variants(annotation: object = RunConfig, path: str = "") -> Iterator[ConfigVariant]:
    """Yield the members of every union below an annotation that are told apart by `kind`; a path
    may come twice.
    """
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (tuple, list, dict):
        for argument in get_args(annotation):
            yield from iter_variants(argument, f"{path}[]")
        return
    sections = list_section_types(annotation)
    for section in sections:
        if len(sections) > 1 and (kind := get_kind(section)):
            yield ConfigVariant(path, kind)
        yield from _iter_field_variants(section, path)


def _iter_field_variants(section: type[BaseModel], path: str) -> Iterator[ConfigVariant]:
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) is not Literal:
            yield from iter_variants(field.annotation, f"{path}.{name}".lstrip("."))


def list_variants() -> list[ConfigVariant]:
    """Return the variants of RunConfig, each once."""
    return list(dict.fromkeys(iter_variants()))


def build_settings(variant: ConfigVariant) -> Settings:
    """Return the smallest settings of a run that has the variant."""
    base = RUN if variant.is_trained else {"tokenizer": RUN["tokenizer"]}
    if str(variant) in ("data.kind=images", "tokenizer.kind=none"):  # images have no text
        base = {"tokenizer": {"kind": "none"}}
    if variant.path.startswith("model.moe."):
        base = RUN | {"model": MODEL | {"moe": MOE}}
    changes = {variant.path: {"kind": variant.kind}} | EXAMPLES[str(variant)]
    settings = base
    for path, value in changes.items():
        settings = _set_value(settings, path.replace("[]", ".[]").split("."), value)
    filled: Settings = fill_default_kinds(settings, [RunConfig])
    return filled


def build_config(variant: ConfigVariant) -> RunConfig:
    """Return the smallest run that has the variant. KeyError for a variant without an example."""
    return RunConfig.model_validate(build_settings(variant))


def _set_value(settings: Settings, keys: list[str], value: Any) -> Settings:
    first, *rest = keys
    if rest == ["[]"]:
        return settings | {first: [value]}
    if rest:
        return settings | {first: _set_value(settings.get(first) or {}, rest, value)}
    return settings | {first: value}


def _choose(
    path: str, kind: str, section: Settings | None = None, **more: Any
) -> tuple[str, Settings]:
    """Return an entry of EXAMPLES: `section` are further fields of the variant, `more` settings
    elsewhere.
    """
    settings = {key.replace("__", "."): value for key, value in more.items()}
    return f"{path}.kind={kind}", settings | ({path: {"kind": kind} | section} if section else {})


def _choose_each(path: str, *kinds: str, **more: Any) -> Iterator[tuple[str, Settings]]:
    return (_choose(path, kind, **more) for kind in kinds)


PAIRS: Settings = {
    "kind": "pairs",
    "source": ["text.en"],
    "target": ["text.de"],
    "heldout_source": ["text.en"],
    "heldout_target": ["text.de"],
}
LABELLED: Settings = {
    "kind": "labelled",
    "inputs": ["labels.tsv"],
    "heldout_inputs": ["labels.tsv"],
}
IMAGES: Settings = {"kind": "images", "inputs": ["images.npz"], "heldout_inputs": ["images.npz"],
    "image_size": 8,
                    "num_channels": 1}  # fmt: skip
ITEMS: Settings = {"kind": "ngram", "sets": [{"name": "s", "files": ["items.jsonl"],
                                             "query_fields": ["q"]}]}  # fmt: skip
TOKENS: Settings = {"kind": "tokens", "inputs": ["megatron/train.idx"]}
CHAT: Settings = {"kind": "chat", "inputs": ["chats.jsonl"], "template": "chat.jinja"}
VIT: Settings = {"family": "encoder", "vocab_size": 256, "max_position_embeddings": 5,
    "position": {"kind": "learned"},
                 "patches": {"image_size": 8, "patch_size": 4, "num_channels": 1}}  # fmt: skip
LABELS: Settings = {"kind": "classification", "num_labels": 3}
ENCODER: Settings = {"kind": "encoder", "model": "judge", "max_tokens": 64}
EMBEDDED: Settings = {"data__inputs": ["vectors.jsonl"],
    "data__deduplicate__semantic__kind": "embeddings"}  # fmt: skip
PAIR_BATCH: Settings = {"sequence_length": LENGTH, "tokens": 4 * LENGTH}
# An encoder that Hugging Face has a model type for.
BERT: Settings = {
    "model__family": "encoder",
    "model__residual": {"kind": "post"},
    "model__norm": {"kind": "layernorm", "eps": 1e-12},
    "model__position": {"kind": "learned"},
    "model__attention": {"kind": "multi_head", "qkv_bias": True, "output_bias": True},
    "model__feed_forward": {"kind": "gelu", "bias": True},
    "model__embedding": {"norm": True, "token_types": 2},
}
XLNET: Settings = {
    "model__family": "encoder",
    "model__position": {"kind": "transformer_xl", "segments": 2},
    "model__tie_word_embeddings": True,
}
RECURRENT: Settings = {
    "model__family": "encoder_decoder",
    "model__intermediate_size": 0,
    "model__num_attention_heads": 1,
    "model__num_key_value_heads": 1,
    "model__position": {"kind": "none"},
}
ROPE_SCALING = {"factor": 2.0, "original_max_position_embeddings": 8}
FEED_FORWARDS = (
    "relu",
    "squared_relu",
    "gelu",
    "gelu_tanh",
    "silu",
    "swiglu",
    "geglu",
    "geglu_tanh",
    "clamped_swiglu",
)

MODEL_EXAMPLES: dict[str, Settings] = dict([
    *_choose_each("model.norm", "rmsnorm", "layernorm"),
    *_choose_each("model.residual", "pre", "post", "deepnorm", "sandwich", "output", "parallel",
        "reversible"),
    *_choose_each("model.position", "rope", "learned", "sinusoidal", "alibi", "relative_bias",
        "none"),
    *_choose_each("model.position", "transformer_xl"),
    *_choose_each("model.position.scaling", "none"),
    _choose("model.position.scaling", "linear", {"factor": 2.0}),
    _choose("model.position.scaling", "ntk", ROPE_SCALING),
    _choose("model.position.scaling", "yarn", ROPE_SCALING),
    _choose("model.position.scaling", "llama3", ROPE_SCALING),
    _choose("model.position.scaling", "longrope", {
        "original_max_position_embeddings": 8, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }),
    *_choose_each("model.attention", "multi_head"),
    _choose("model.attention", "latent", {
        "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
    }),
    _choose("model.attention", "longformer", {"windows": [8]}, **BERT, model__head={"kind": "mlm"}),
    _choose("model.attention", "linformer", {"projected_length": 4}, **BERT,
        model__head={"kind": "mlm"},
            batch__attention_scope="window"),
    _choose("model.attention", "lsh", {"chunk_length": 4, "num_hashes": 2},
        model__position={"kind": "learned"}),
    _choose("model.attention", "segment_memory", {"segment_length": 4, "memory_length": 6},
            model__position={"kind": "transformer_xl"}),
    _choose("model.attention", "python", {"path": f"{TEMPLATES}/mixer.py:LinearAttention"}),
    *(
        _choose("model.linear_attention", kind, {
            "num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5,
            "chunk_length": 4,
        }, model__layer_types=["linear_attention", "full_attention"])
        for kind in ("gated_delta", "kimi_delta", "mamba2")
    ),
    *_choose_each("model.recurrence", "fixed", "adaptive"),
    *_choose_each("model.rnn", "elman", "lstm", "gru", **RECURRENT, data=PAIRS, batch=PAIR_BATCH),
    *_choose_each("model.parametrization", "standard", "unit_scaled"),
    _choose("model.parametrization", "mup", {"base_hidden_size": 8}),
    _choose("model.parametrization", "complete_p", {"base_hidden_size": 8,
        "base_num_hidden_layers": 1}),
    *_choose_each("model.feed_forward", *FEED_FORWARDS),
    _choose("model.feed_forward", "python",
        {"path": f"{TEMPLATES}/feed_forward.py:SquaredRelu", "options": {"bias": True}}),
    *_choose_each("model.moe.expert", *FEED_FORWARDS),
    *_choose_each("model.moe.routing", "token_choice"),
    _choose("model.moe.routing", "capacity", {"factor": 1.0, "scope": "document"}),
    _choose("model.moe.routing", "expert_choice", {"factor": 1.0},
        model__moe__balance={"kind": "none"}),
    *_choose_each("model.moe.balance", "bias", "auxiliary_loss", "none"),
    *_choose_each("model.head", "lm"),
    *_choose_each("model.head", "mlm", **BERT, model__tie_word_embeddings=True),
    _choose("model.head", "features", {"pooler": True}, **BERT),
    *_choose_each("model.head", "permutation", **XLNET),
    _choose("model.head", "classification", {"num_labels": 3}, **BERT, data=LABELLED,
        batch=PAIR_BATCH),
])  # fmt: skip

TRAINING_EXAMPLES: dict[str, Settings] = dict([
    _choose("batch.ramp", "linear", {"start_tokens": 512, "ramp_tokens": 4096}),
    _choose("batch.ramp", "noise_scale", {"start_tokens": 512, "doubled_after_steps": [2]}),
    *_choose_each("objective", "next_token"),
    _choose("objective", "translation", model__family="encoder_decoder", data=PAIRS,
        batch=PAIR_BATCH),
    _choose("objective", "masked", model__family="encoder", model__head={"kind": "mlm"}),
    _choose("objective", "masked_next_sentence", model__family="encoder",
        model__embedding={"token_types": 2},
            model__head={"kind": "mlm", "pooler": True, "next_sentence": True}),
    _choose("objective", "permutation", {"context_factor": 3}, model__head={"kind": "permutation"},
        **XLNET),
    _choose("objective", "span_corruption", {"noise_density": 0.3}, model__family="encoder_decoder",
            batch__attention_scope="window"),
    _choose(
        "objective", "classification", model__family="encoder", model__head=LABELS, data=LABELLED,
        batch=PAIR_BATCH
    ),
    *_choose_each("optimizer", "adamw", "adam", "muon", "lion", "ademamix", "schedule_free",
        "adafactor", "soap"),
    *_choose_each("schedule", "cosine", "linear", "constant"),
    _choose("schedule", "wsd", {"decay_tokens": 8 * LENGTH}),
    _choose("schedule", "inverse_sqrt", {"warmup_tokens": 8 * LENGTH}),
    _choose("schedule", "noam", {"warmup_steps": 4}),
    _choose("optimizer", "python", {"path": f"{TEMPLATES}/optimizer.py:SignMomentum"}),
    _choose("schedule", "python", {"path": f"{TEMPLATES}/schedule.py:Stairs"}),
    *_choose_each("engine", "torch", "deepspeed", "accelerate"),
    *_choose_each("layout.pipeline_schedule", "gpipe", "1f1b", "interleaved", layout__pipeline=2),
])  # fmt: skip

# Relative paths start in the folder that the walk makes.
DATA_EXAMPLES: dict[str, Settings] = dict([
    *_choose_each("data", "crawl"),
    ("data.kind=pairs", {"data": PAIRS, "model": MODEL | {"family": "encoder_decoder"},
        "batch": PAIR_BATCH}),
    ("data.kind=labelled", {"data": LABELLED, "model": MODEL | {"family": "encoder",
        "head": LABELS},
                            "batch": PAIR_BATCH}),
    ("data.kind=tokens", {"data": TOKENS, "tokenizer": {"kind": "file",
        "path": "prepared/tokenizer"}}),
    ("data.kind=chat", {"data": CHAT, "tokenizer": {"kind": "file", "path": "prepared/tokenizer"}}),
    ("data.kind=images", {"data": IMAGES, "model": MODEL | VIT | {"head": LABELS},
                          "batch": {"sequence_length": 5, "tokens": 20}}),
    _choose("data", "mixture", {"sources": [{"folder": "prepared"}]}),
    *_choose_each("data.url", "none"),
    _choose("data.url", "lists", {"hosts": {"entries": ["blocked.example"]}}),
    *_choose_each("data.read.pdf", "none", "pdfium"),
    *_choose_each("data.document_order", "hash"),
    _choose("data.document_order", "repository", {"repository_field": "file", "path_field": "url"}),
    *_choose_each("data.extract", "article", "resiliparse", "trafilatura"),
    _choose("data.extract", "python", {"path": f"{TEMPLATES}/extractor.py:Paragraphs"}),
    *_choose_each("data.unicode", "none", "ftfy", "nfc"),
    *_choose_each("data.rules[]", "gopher_repetition", "gopher_quality", "c4", "c4_datatrove",
        "c4_dolma",
                  "line_corrections", "fineweb_quality", "native_text", "source_code"),
    _choose("data.rules[]", "bad_words", {"word_lists": [{"entries": ["quarry"]}]}),
    _choose("data.rules[]", "fasttext_classifier", {"model": "model.bin", "label": "good",
        "min_score": 0.5}),
    _choose("data.rules[]", "linear_classifier", {"model": "model.npz", "label": "good",
        "min_score": 0.5}),
    _choose("data.rules[]", "encoder_classifier", {"model": "judge", "label": "good",
        "max_tokens": 64}),
    _choose("data.rules[]", "perplexity", {"model": "model.arpa", "backend": "arpa"}),
    _choose("data.rules[]", "python", {"path": f"{TEMPLATES}/rule.py:NoRecipes"}),
    _choose("data.rules[]", "annotator", {"path": f"{TEMPLATES}/annotator.py:Origin"}),
    _choose("data.rules[]", "mapper", {"path": f"{TEMPLATES}/mapper.py:Titled"}),
    *_choose_each("data.deduplicate.url", "url", "none"),
    *_choose_each("data.deduplicate.exact", "text", "none"),
    _choose("data.deduplicate.repeated_segments", "paragraphs"),
    _choose("data.deduplicate.repeated_segments", "lines"),
    _choose("data.deduplicate.repeated_segments", "sentences", {"sentences": 2}),
    _choose("data.deduplicate.repeated_segments", "none"),
    *_choose_each("data.deduplicate.minhash", "minhash", "none"),
    *_choose_each("data.deduplicate.semantic", "none"),
    _choose("data.deduplicate.semantic", "embeddings", {"embeddings": ENCODER}),
    _choose("data.deduplicate.semantic.embeddings", "encoder", {"model": "judge",
        "max_tokens": 64}, **EMBEDDED),
    _choose("data.deduplicate.semantic.embeddings", "column", {"column": "vector"},
        **EMBEDDED),
    _choose("data.deduplicate.substring", "substring", {"min_characters": 60, "min_words": 20}),
    _choose("data.deduplicate.substring", "none"),
    *_choose_each("data.deduplicate.index", "kept", "none"),
    *_choose_each("data.deduplicate.key_filter", "sorted", "bloom",
        data__deduplicate__exact={"kind": "text"}),
    *_choose_each("data.decontaminate", "none"),
    ("data.decontaminate.kind=ngram", {"data.decontaminate": ITEMS}),
    *[
        (f"data.decontaminate.fuzzy.kind={kind}",
            {"data.decontaminate": ITEMS | {"fuzzy": {"kind": kind}}})
        for kind in ("coverage", "none")
    ],
    _choose("data.sampling[]", "values", {"column": "host", "weights": {"one.example": 2}}),
    _choose("data.sampling[]", "buckets",
            {"column": "language_score", "edges": [0.9], "weights": [0.5, 1]}),
    _choose("data.sampling[]", "cap", {"column": "domain", "max_documents": 2}),
    *_choose_each("data.pii", "none", "replace"),
    *_choose_each("data.executor", "local", "inline", "ray", "slurm"),
    *_choose_each("tokenizer", "sentencepiece"),
    _choose("tokenizer", "wordpiece", {"vocab_size": 200}),
    _choose("tokenizer", "python", {"path": f"{TEMPLATES}/tokenizer.py:Bytes"}),
    ("tokenizer.kind=none", {"data": IMAGES, "model": MODEL | VIT | {"head": LABELS},
                             "batch": {"sequence_length": 5, "tokens": 20}}),
    _choose("tokenizer", "file", {"path": "prepared/tokenizer/tokenizer.model"}),
    _choose("evaluation.tasks[]", "choices", {"path": "choices.jsonl"}),
    _choose("evaluation.tasks[]", "pairs", {"path": "pairs.jsonl"}),
    _choose("evaluation.tasks[]", "harness", {"tasks": ["toy"], "include_path": "."}),
])  # fmt: skip

EXAMPLES = MODEL_EXAMPLES | TRAINING_EXAMPLES | DATA_EXAMPLES
