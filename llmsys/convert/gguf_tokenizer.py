"""The keys of a tokenizer in a GGUF file.

Reads the run's tokenizer.model or tokenizer.json. llama.cpp has two kinds that are written: `llama`
(SentencePiece BPE with bytes, by the scores of pieces) and `gpt2` (BPE of bytes, by merges and the
name of a pattern that cuts texts).
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sentencepiece

from llmsys.config.run import RunConfig
from llmsys.convert.tokenizer_files import PROBE, SPACE
from llmsys.errors import ConfigError
from llmsys.train.chat_data import get_template_folder
from llmsys.train.run_data import get_prefix_ids, get_tokenizer_path, load_run_tokenizer
from llmsys.vocabulary.chat_template import TEMPLATE_NAME
from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer
from llmsys.vocabulary.tokenizer import iter_protobuf_fields

# SentencePiece and GGUF have the same numbers of types.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_PIECE, _PIECE_TYPE = 1, 3  # fields of SentencePiece's ModelProto

_REMEDY = "Export to Hugging Face's format instead, without --to."
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Expression that cuts texts into words → llama.cpp's name of it.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {_CUT % r"\p{N}{1,3}": "llama-bpe", _CUT % r"\p{N}": "qwen2"}


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer as GGUF has it.

    Attributes:
        model: `llama` or `gpt2`.
        pieces: all pieces by id, filled up to the rows of the embedding.
        types: type of each piece.
        scores: preference of each piece; only for `llama`.
        merges: pairs in their order, separated by a space; only for `gpt2`.
        pattern: llama.cpp's name of the cut into words.
        ids: ids by their names in GGUF, such as eos.
        adds_begin: whether the begin id precedes a prompt.
        adds_space: whether a space precedes a text.
        chat_template: Jinja template of chats, if there is one.
    """

    model: str
    pieces: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    pattern: str = "default"
    ids: dict[str, int] = field(default_factory=dict)
    adds_begin: bool = False
    adds_space: bool = False
    chat_template: str | None = None

    def add_keys(self, writer: Any) -> None:
        """Add the keys to a GGUFWriter."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pattern)
        writer.add_token_list(self.pieces)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, token in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(token)
        writer.add_add_bos_token(self.adds_begin)
        writer.add_add_eos_token(False)
        if self.model == "llama":
            writer.add_add_space_prefix(self.adds_space)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def read_gguf_tokenizer(run: RunConfig) -> GgufTokenizer:
    """Return the tokenizer of a run; prompts begin as in its training.

    Args:
        run: the config of the run.

    Returns:
        The tokenizer, with as many pieces as the model has rows.

    Raises:
        ConfigError: llama.cpp has no such tokenizer.
        DataError: the run has no tokenizer.
    """
    if run.tokenizer.kind == "python":
        raise ConfigError(
            f"--to gguf: tokenizer.kind=python is code, which no GGUF file has. {_REMEDY}"
        )
    tokenizer = load_run_tokenizer(run)
    prefix = get_prefix_ids(run.generation, tokenizer)
    if len(prefix) > 1:
        raise ConfigError(
            f"--to gguf: generation.prefix_pieces has {len(prefix)} pieces, and llama.cpp puts "
            "one before a prompt. Use one, or []."
        )
    ids = {"eos": tokenizer.eos_id} | ({"bos": prefix[0]} if prefix else {})
    path, rows = get_tokenizer_path(run), run.model.vocab_size
    if isinstance(tokenizer, HuggingFaceTokenizer):
        found = _read_json(tokenizer, path, rows, ids, adds_begin=bool(prefix))
    else:
        found = _read_sentencepiece(path, rows, ids, adds_begin=bool(prefix))
    template = get_template_folder(run) / TEMPLATE_NAME
    return replace(found, chat_template=template.read_text() if template.is_file() else None)


def _fill_rows(pieces: list[str], types: list[int], rows: int) -> tuple[list[str], list[int]]:
    """Add unused pieces for the rows of the embedding that the tokenizer lacks."""
    return pieces + [f"[PAD{i}]" for i in range(len(pieces), rows)], types + [UNUSED] * (
        rows - len(types)
    )


def _read_sentencepiece(
    path: Path, rows: int, ids: dict[str, int], *, adds_begin: bool
) -> GgufTokenizer:
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    size = range(library.vocab_size())
    normal = library.normalize(PROBE)
    prefixed = SPACE + PROBE.replace(" ", SPACE)
    scores = [float(library.get_score(i)) for i in size]
    if normal not in (prefixed, prefixed[1:]):
        raise ConfigError(f"--to gguf: {path} normalizes texts, and llama.cpp does not. {_REMEDY}")
    types = _list_sentencepiece_types(path.read_bytes())
    if types.count(BYTE) < 256:
        raise ConfigError(
            f"--to gguf: {path} has no pieces for bytes (tokenizer.byte_fallback), which "
            f"llama.cpp needs. {_REMEDY}"
        )
    if any(
        not score.is_integer() for score, kind in zip(scores, types, strict=True) if kind == NORMAL
    ):
        raise ConfigError(
            f"--to gguf: {path} is a unigram model, and llama.cpp has those of T5 only. {_REMEDY}"
        )
    pieces, types = _fill_rows([library.id_to_piece(i) for i in size], types, rows)
    scores += [0.0] * (len(pieces) - len(scores))
    ids = ids | ({"unk": library.unk_id()} if library.unk_id() >= 0 else {})
    return GgufTokenizer(
        "llama",
        pieces,
        types,
        scores,
        ids=ids,
        adds_begin=adds_begin,
        adds_space=normal == prefixed,
    )


def _list_sentencepiece_types(model: bytes) -> list[int]:
    """Return the type of every piece. The library has no question for those that the user
    defined.
    """
    pieces = [value for field, value in iter_protobuf_fields(memoryview(model)) if field == _PIECE]
    fields = [
        dict(iter_protobuf_fields(piece)) for piece in pieces if isinstance(piece, memoryview)
    ]
    types = (found.get(_PIECE_TYPE, NORMAL) for found in fields)
    return [kind if isinstance(kind, int) else NORMAL for kind in types]


def _read_json(
    tokenizer: HuggingFaceTokenizer, path: Path, rows: int, ids: dict[str, int], *, adds_begin: bool
) -> GgufTokenizer:
    values = tokenizer.to_dict()
    model, added = values["model"], {token["id"]: token for token in values["added_tokens"]}
    if model.get("type") != "BPE":
        raise ConfigError(
            f"--to gguf: {path} is a {model.get('type')} model, and llama.cpp reads BPE. {_REMEDY}"
        )
    names = {token: piece for piece, token in model["vocab"].items()} | {
        i: one["content"] for i, one in added.items()
    }
    pieces = [names.get(i, f"[PAD{i}]") for i in range(max(names) + 1)]
    types = [
        (CONTROL if added[i]["special"] else USER_DEFINED)
        if i in added
        else NORMAL
        if i in names
        else UNUSED
        for i in range(len(pieces))
    ]
    merges = [one.split(" ") if isinstance(one, str) else list(one) for one in model["merges"]]
    if model.get("byte_fallback"):
        types = [
            BYTE if _BYTE.fullmatch(piece) else kind
            for piece, kind in zip(pieces, types, strict=True)
        ]
        first = {"".join(pair): rank for rank, pair in reversed(list(enumerate(merges)))}
        scores = [-float(first.get(piece, len(merges))) if kind == NORMAL else 0.0
                  for piece, kind in zip(pieces, types, strict=True)]  # fmt: skip
        pieces, types = _fill_rows(pieces, types, rows)
        space = any(
            one.get("type") == "Prepend"
            for one in _list_steps(values.get("normalizer"), "normalizers")
        )
        scores += [0.0] * (len(pieces) - len(scores))
        return GgufTokenizer(
            "llama", pieces, types, scores, ids=ids, adds_begin=adds_begin, adds_space=space
        )
    pattern = _find_pattern(values, path)
    pieces, types = _fill_rows(pieces, types, rows)
    joined = [" ".join(pair) for pair in merges]
    return GgufTokenizer(
        "gpt2", pieces, types, merges=joined, pattern=pattern, ids=ids, adds_begin=adds_begin
    )


def _list_steps(section: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence."""
    return [] if section is None else section.get(key, [section])


def _find_pattern(values: dict[str, Any], path: Path) -> str:
    """Return llama.cpp's name of the cut into words. Raise ConfigError for a cut that it does
    not have.
    """
    steps = _list_steps(values.get("pre_tokenizer"), "pretokenizers")
    kinds = [step.get("type") for step in steps]
    normalizers = [
        step.get("type") for step in _list_steps(values.get("normalizer"), "normalizers")
    ]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not normalizers:
        return "gpt-2"
    expression = (
        steps[0].get("pattern", {}).get("Regex", "") if kinds == ["Split", "ByteLevel"] else ""
    )
    # Its Llama 3 takes a word that is a piece before any merge.
    whole_words = bool(values["model"].get("ignore_merges")) == (
        _PATTERNS.get(expression) == "llama-bpe"
    )
    if expression in _PATTERNS and whole_words and normalizers in ([], ["NFC"]):
        return _PATTERNS[expression]
    raise ConfigError(
        f"--to gguf: {path} cuts texts by {', '.join(map(str, kinds)) or 'nothing'} "
        f"{expression!r:.40}, of which llama.cpp has no name here (known: gpt-2, "
        f"{', '.join(_PATTERNS.values())}). {_REMEDY}"
    )
