"""Typed reader of a config.json that tracks every key, and the list of keys that never change the
computation.

Invariants:
- A key that was not read and is not in HARMLESS is an error.
- `raise_violations` reports all problems at once: wrong types, unsupported values and unknown keys.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

from llmsys.errors import ConfigError, Violation, format_choices
from llmsys.log import get_logger

_FILE = """
    _name_or_path name_or_path _commit_hash transformers_version dtype torch_dtype torchscript
    use_bfloat16 auto_map
    model_type tokenizer_class architectures keys_to_ignore_at_inference unsloth_fixed
    unsloth_version
    custom_pipelines transformers.js_config
"""
# Runtime options of transformers: kernels, memory, additional outputs.
_RUN = """
    use_cache gradient_checkpointing chunk_size_feed_forward return_dict use_return_dict
    output_attentions
    output_hidden_states output_past output_scores
    output_router_logits tie_last_hidden_states cache_implementation attn_implementation
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    _experts_implementation
    _experts_implementation_internal experts_implementation _flash_attn_2_enabled
    use_flash_attention_2 tf_legacy_loss
"""
# Token ids do not change the network. The model types where one does read it themselves.
_IDS = """
    pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id
    decoder_start_token_id
    forced_bos_token_id forced_eos_token_id force_bos_token_to_be_generated prefix
"""
# Labels and heads of fine-tuning. The classification head reads its own keys.
_TASKS = """
    id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params
    classifier_dropout
    classif_dropout summary_activation summary_first_dropout summary_last_dropout
    summary_proj_to_labels summary_type
    summary_use_proj
"""
_GENERATION = """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens
    diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length
    no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature
    top_k top_p typical_p
"""

HARMLESS = frozenset(" ".join((_FILE, _RUN, _IDS, _TASKS, _GENERATION)).split())


_MISSING: Any = object()
_log = get_logger(__name__)


class ConfigJsonReader:
    """Reader of one mapping, with the defaults of its model type.

    `read_…` methods take the key and its other spellings. A value of a wrong type is recorded as a
    problem and a legal value is returned, so that one pass finds every problem.
    """

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> None:
        """Begin without a problem.

        Args:
            values: The mapping, as parsed from JSON.
            defaults: The model type's value of each key that a file may leave out.
            prefix: Path of the mapping in the file, which messages put before its keys. Default:
                "", the file itself.
        """
        self.values, self.defaults, self.prefix = values, defaults, prefix
        self.asked: set[str] = set()
        self.sections: dict[str, ConfigJsonReader] = {}
        self.problems: list[Violation] = []
        self.notes: list[str] = []

    def read_int(self, *names: str) -> int:
        """Read an integer; null is a problem.

        Args:
            *names: The key and its other spellings. Spellings with unequal values are a problem.

        Returns:
            The value of the first spelling that the file has, else the default.
        """
        found = self._read_typed(names, _to_int, "a whole number")
        return 1 if found is None else int(found)

    def read_optional_int(self, *names: str) -> int | None:
        """Read an integer or null.

        Args:
            *names: The key and its other spellings.

        Returns:
            The value or the default; None for null, and where there is neither.
        """
        return self._read_typed(names, _to_int, "a whole number", null=True)  # type: ignore[no-any-return]

    def read_float(self, *names: str) -> float:
        """Return a finite number; null is a problem."""
        found = self._read_typed(names, _to_float, "a finite number")
        return 1.0 if found is None else float(found)

    def read_optional_float(self, *names: str) -> float | None:
        """Return a finite number or None."""
        return self._read_typed(names, _to_float, "a finite number", null=True)  # type: ignore[no-any-return]

    def read_positive_float(self, *names: str) -> float:
        """Read a number above 0; anything else is a problem.

        Args:
            *names: The key and its other spellings.

        Returns:
            The value or the default; 1 after a problem.
        """
        value = self.read_float(*names)
        if value > 0:
            return value
        self.add_violation(names[0], f"{value} is not above 0.")
        return 1.0

    def read_bool(self, *names: str) -> bool:
        """Read a boolean.

        Args:
            *names: The key and its other spellings.

        Returns:
            The value or the default; False for null, as in Python, and where there is neither.
        """
        return bool(self._read_typed(names, _to_bool, "true or false", null=True))

    def read_str(self, *names: str) -> str:
        """Read text; null is a problem.

        Args:
            *names: The key and its other spellings.

        Returns:
            The value or the default; "" after a problem without a default.
        """
        return str(self._read_typed(names, _to_str, "text") or "")

    def read_float_list(self, name: str) -> list[float]:
        """Return a list of numbers; null is an empty list."""
        return (
            self._read_typed(
                (name,), _build_list_converter(_to_float), "a list of numbers", null=True
            )
            or []
        )

    def read_int_list(self, name: str) -> list[int]:
        """Read a list of integers.

        Args:
            name: The key.

        Returns:
            The value or the default; empty for null, and where there is neither.
        """
        return (
            self._read_typed(
                (name,), _build_list_converter(_to_int), "a list of whole numbers", null=True
            )
            or []
        )

    def read_str_list(self, name: str) -> list[str]:
        """Read a list of texts.

        Args:
            name: The key.

        Returns:
            The value or the default; empty for null, and where there is neither.
        """
        return (
            self._read_typed((name,), _build_list_converter(_to_str), "a list of texts", null=True)
            or []
        )

    def read_section(self, name: str, defaults: dict[str, Any]) -> "ConfigJsonReader":
        """Return a reader of the mapping under `name`, empty if missing or null. Call
        `merge_section` after reading.
        """
        values = self._read_typed((name,), _to_mapping, "a mapping", null=True)
        return ConfigJsonReader(values or {}, defaults, f"{self.prefix}{name}.")

    def merge_section(self, section: "ConfigJsonReader") -> None:
        """Add the problems, unknown keys and notes of a nested mapping."""
        self.problems += section.problems + section.find_unknown_keys()
        self.notes += section.notes

    def get_key(self, key: str) -> "tuple[ConfigJsonReader, str]":
        """Return the reader of the mapping in which a dotted key is, and the last word of the key.

        Call `close_sections` after reading.
        """
        first, dot, rest = key.partition(".")
        return self.get_section(first).get_key(rest) if dot else (self, key)

    def get_section(self, name: str) -> "ConfigJsonReader":
        """Return the reader of the mapping under `name`, the same one in each call."""
        if name not in self.sections:
            self.sections[name] = self.read_section(name, {})
        return self.sections[name]

    def close_sections(self) -> None:
        """Add the problems, unknown keys and notes of all mappings of `get_section`."""
        for section in self.sections.values():
            section.close_sections()
            self.merge_section(section)

    def has_value(self, name: str) -> bool:
        """Return whether the file itself has the key with a value other than null."""
        return self.values.get(name) is not None

    def read_choice(self, name: str, legal: Iterable[str]) -> str:
        """Return one of the legal values; the first one if the value is not legal."""
        words, value = list(legal), self.read_str(name)
        if value in words:
            return value
        self.add_violation(
            name,
            f"{value!r} is not supported. Known: "
            f"{format_choices(words)}.{_format_suggestion(value, words)}",
        )
        return words[0]

    def require_value(self, name: str, *legal: Any, why: str) -> None:
        """Record a problem if the optional key has a value other than the legal ones."""
        self.asked.add(name)
        value = self.values.get(name, legal[0])
        # In Python 0 == False and 1 == True, but they differ in JSON.
        if not any(
            value == choice and isinstance(value, bool) == isinstance(choice, bool)
            for choice in legal
        ):
            shown = format_choices([_format_json(choice) for choice in legal])
            self.add_violation(
                name, f"{_format_json(value)} is not supported: {why}. Only {shown} can be built."
            )

    def ignore_keys(self, *names: str) -> None:
        """Accept keys of this model type that do not change the model.

        Args:
            *names: Keys. Whatever their value, they are no longer unknown keys.
        """
        self.asked.update(names)

    def add_note(self, name: str, text: str) -> None:
        """Accept a key that is deliberately not converted, and log `text` if it is set."""
        self.asked.add(name)
        if self.values.get(name):
            self.notes.append(f"{self.prefix}{name}: {text}")

    def add_violation(self, name: str, message: str) -> None:
        """Record one violation; all of them are raised together.

        Args:
            name: key of config.json.
            message: the value, the rule and the next step.
        """
        self.problems.append(Violation(self.prefix + name, message))

    def find_unknown_keys(self) -> list[Violation]:
        """Return a problem for each key that was not read and is not harmless."""
        known = self.asked | self.defaults.keys()
        return [
            Violation(self.prefix + key, _format_unknown_key(key, sorted(known)))
            for key in self.values
            if key not in self.asked and key not in HARMLESS
        ]

    def raise_violations(self, source: str) -> None:
        """Raise an error with all violations and unknown keys, or log the notes if there are none.

        Args:
            source: name of the file in messages.

        Raises:
            ConfigError: there is a violation or an unknown key.
        """
        found = [*self.problems, *self.find_unknown_keys()]
        if found:
            head = "1 problem" if len(found) == 1 else f"{len(found)} problems"
            lines = [f"{source}: {problem.key}: {problem.message}" for problem in found]
            raise ConfigError("\n  ".join([f"{head} in {source}:", *dict.fromkeys(lines)]))
        for note in self.notes:
            _log.info("%s: %s", source, note)

    def _read_typed(
        self, names: tuple[str, ...], read: Callable[[Any], Any], what: str, null: bool = False
    ) -> Any:
        self.asked.update(names)
        given = [name for name in names if name in self.values]
        default = next((self.defaults[name] for name in names if name in self.defaults), None)
        name = given[0] if given else names[0]
        raw = self.values[name] if given else default
        for other in given[1:]:
            if self.values[other] != raw:
                self.add_violation(
                    other,
                    f"{_format_json(self.values[other])} and {name}={_format_json(raw)} disagree. "
                    "Keep one of them.",
                )
        if raw is None and null:
            return None
        value = _MISSING if raw is None else read(raw)
        if value is not _MISSING:
            return value
        missing = not given and raw is None
        self.add_violation(
            name, f"is missing. Give {what}." if missing else f"{_format_json(raw)} is not {what}."
        )
        return default


def _to_int(value: Any) -> Any:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) else _MISSING


def _to_float(value: Any) -> Any:
    is_number = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    )
    return float(value) if is_number else _MISSING


def _to_bool(value: Any) -> Any:
    return value if isinstance(value, bool) else _MISSING


def _to_str(value: Any) -> Any:
    return value if isinstance(value, str) else _MISSING


def _to_mapping(value: Any) -> Any:
    return value if isinstance(value, dict) else _MISSING


def _build_list_converter(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert_list(value: Any) -> Any:
        entries = [read(entry) for entry in value] if isinstance(value, list) else [_MISSING]
        return _MISSING if any(entry is _MISSING for entry in entries) else entries

    return convert_list


def _format_json(value: Any) -> str:
    text = (
        {None: "null", True: "true", False: "false"}.get(value)
        if isinstance(value, bool | None)
        else None
    )
    text = text or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _format_unknown_key(key: str, known: list[str]) -> str:
    hint = _format_suggestion(key, known) or " Remove it if it does not change the computation."
    return f"unknown field, which may change the computation.{hint}"


def _format_suggestion(value: str, words: list[str]) -> str:
    close = difflib.get_close_matches(value, words, n=1)
    return f" Did you mean {close[0]}?" if close else ""
