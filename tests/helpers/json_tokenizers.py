"""Small tokenizer.json files of the kinds that published models have, trained on the spot."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LINES = [f"The lazy dog jumps over {i} quick foxes; it's the {i % 7}th box." for i in range(200)]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = WORDS + r"|\p{N}{1,3}" + REST
QWEN2 = WORDS + r"|\p{N}" + REST


def train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def train_gpt2() -> tuple[Tokenizer, dict[str, Any]]:
    """Byte-level; nothing is added to a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
    )
    end = "<|endoftext|>"
    return train(tokenizer, trainer), {"bos_token": end, "eos_token": end, "unk_token": end}


def train_llama3() -> tuple[Tokenizer, dict[str, Any]]:
    """Byte-level with its own cuts; the begin piece is put before a text, pieces follow the
    vocabulary.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    train(tokenizer, trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="$A $B",
                special_tokens=[("<|begin_of_text|>", begin)],
            ),
        ]
    )
    eos = {"__type": "AddedToken", "content": "<|end_of_text|>", "special": True}
    return tokenizer, {"bos_token": "<|begin_of_text|>", "eos_token": eos}


def train_qwen2() -> tuple[Tokenizer, dict[str, Any]]:
    """Byte-level with composed characters and single digits; there is no begin piece at all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    train(
        tokenizer,
        trainers.BpeTrainer(vocab_size=310, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer, {
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }


def train_llama2() -> tuple[Tokenizer, dict[str, Any]]:
    """SentencePiece's BPE with bytes in the vocabulary, as transformers writes it."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    train(
        tokenizer, trainers.BpeTrainer(vocab_size=420, special_tokens=special, max_token_length=12)
    )
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = values["added_tokens"][:3]  # bytes are pieces, not control tokens
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def train_bert() -> tuple[Tokenizer, dict[str, Any]]:
    """WordPiece; its files say nothing but what stands in tokenizer.json."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    train(tokenizer, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer, {"do_lower_case": True}


def train_t5() -> tuple[Tokenizer, dict[str, Any]]:
    """Unigram, which finds </s> in a text if it is not kept from it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    alphabet = list("</s>abcdefghijklmnopqrstuvwxyz ")
    trainer = trainers.UnigramTrainer(
        vocab_size=150,
        special_tokens=special,
        unk_token="<unk>",
        initial_alphabet=alphabet,
        show_progress=False,
    )
    train(tokenizer, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def train_mistral() -> tuple[Tokenizer, dict[str, Any]]:
    """As llama2, but no piece reaches over a space, as in published models."""
    tokenizer, config = train_llama2()
    values = json.loads(tokenizer.to_str())
    vocabulary, merges = values["model"]["vocab"], values["model"]["merges"]
    across = {piece for piece in vocabulary if "▁" in piece.lstrip("▁")}
    values["model"]["merges"] = [pair for pair in merges if not across & {*pair, "".join(pair)}]
    for number, piece in enumerate(sorted(across)):  # ids stay without gaps
        vocabulary[f"<unused{number}>"] = vocabulary.pop(piece)
    return Tokenizer.from_str(json.dumps(values)), config


KINDS = {
    "mistral": train_mistral,
    "gpt2": train_gpt2,
    "llama3": train_llama3,
    "qwen2": train_qwen2,
    "llama2": train_llama2,
    "bert": train_bert,
    "t5": train_t5,
}
LOSSLESS = ("gpt2", "llama3", "qwen2", "llama2")


def write(kind: str, folder: Path) -> Tokenizer:
    """tokenizer.json and tokenizer_config.json of a kind; gives the library's own tokenizer."""
    tokenizer, config = KINDS[kind]()
    # as in NeoX and OLMo: runs of spaces are text, and so is what is added without being special
    if kind == "gpt2":
        tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    folder.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
