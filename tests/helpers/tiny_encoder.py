"""A small BERT that classifies texts, with random weights and a vocabulary of words."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from tests.helpers.tiny_crawl import WORDS

LABELS = {1: ["quality"], 2: ["bad", "good"], 3: ["bad", "fair", "good"]}


def save_tiny_encoder(
    folder: Path, labels: int = 2, problem: str | None = None, seed: int = 0
) -> Path:
    """Write a small BERT with random weights and a tokenizer of words."""
    torch.manual_seed(seed)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ",", ".", *dict.fromkeys(WORDS)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, special)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]"
    ).save_pretrained(folder)
    names = dict(enumerate(LABELS[labels]))
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,
        id2label=names,
        label2id={name: number for number, name in names.items()},
        problem_type=problem,  # type: ignore[arg-type]
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder
