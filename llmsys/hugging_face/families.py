"""The model types of Hugging Face that can be read and written: the table of `families.yaml`, and
one reader and one writer that walk it.

Reads: `families.yaml`, whose first lines explain its notation.

Invariants:
- What a table of keys cannot say is a special: a function that reads, and one that writes.
- The writer raises KeyError, TypeError or AttributeError for a model without what the family needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from llmsys.hugging_face.config_json import ConfigJsonReader
from llmsys.hugging_face.decoder_fields import (
    read_falcon_branches,
    read_four_times,
    read_rope_of_axes,
    read_rope_of_channels,
    read_rope_of_two_kinds,
    read_rope_section,
    read_rope_with_yarn,
    read_score_scale,
    write_falcon_branches,
    write_four_times,
    write_rope_of_channels,
    write_rope_of_two_kinds,
    write_rope_section,
    write_score_scale,
)
from llmsys.hugging_face.encoder_decoder_fields import (
    read_encoder_sizes,
    read_t5_feed_forward,
    read_t5_stacks,
    read_two_vocabularies,
    write_encoder_sizes,
    write_t5_feed_forward,
    write_t5_stacks,
    write_two_vocabularies,
)
from llmsys.hugging_face.encoder_fields import (
    read_bert_head,
    read_divided_heads,
    read_image_head,
    read_image_positions,
    read_positions_after_padding,
    write_bert_head,
    write_image_head,
    write_positions_after_padding,
)
from llmsys.hugging_face.expert_fields import (
    read_dbrx_sections,
    read_dense_first,
    read_expert_groups,
    read_indexed_layers,
    read_latent_heads,
    read_layers_between,
    read_sparse_layers,
    read_undivided_heads,
    write_dbrx_sections,
    write_dense_first,
    write_expert_groups,
    write_latent_heads,
    write_layers_between,
    write_sparse_layers,
)
from llmsys.hugging_face.falcon_h1_fields import (
    read_falcon_h1_mixer,
    read_projection_factors,
    write_falcon_h1_mixer,
    write_projection_factors,
)
from llmsys.hugging_face.granite_fields import (
    read_granite_feed_forward,
    read_granite_layers,
    read_multipliers,
    read_optional_rope,
    write_granite_feed_forward,
    write_granite_layers,
    write_multipliers,
    write_optional_rope,
)
from llmsys.hugging_face.kimi_fields import (
    read_kimi_experts,
    read_kimi_layers,
    write_kimi_experts,
    write_kimi_layers,
)
from llmsys.hugging_face.layer_windows import (
    read_early_windows,
    read_every_window,
    read_full_attention,
    read_late_windows,
    read_layers_without_rope,
    read_switched_window,
    read_windows_between,
    read_windows_from,
    read_windows_with_rope,
    write_every_window,
    write_layer_windows,
    write_layers_without_rope,
    write_switched_window,
    write_windows_between,
    write_windows_from,
    write_windows_with_rope,
)
from llmsys.hugging_face.linear_layers import (
    read_linear_layers,
    read_mamba_layers,
    read_olmo_layers,
    read_optional_theta,
    write_linear_layers,
    write_mamba_layers,
    write_olmo_layers,
    write_optional_theta,
)
from llmsys.hugging_face.nemotron_fields import (
    read_nemotron_layers,
    read_step_limits,
    write_nemotron_layers,
    write_step_limits,
)
from llmsys.hugging_face.shared_fields import (
    Values,
    check_common_keys,
    check_decoder_class,
    get_activation_name,
    read_activation,
    read_architecture,
    read_gated_kind,
)

FILE = Path(__file__).with_name("families.yaml")

# Parts of an entry to which an entry that is like it adds.
MAPPINGS = ("keys", "values", "writes", "only", "notes", "special", "defaults")
PARTS = (*MAPPINGS, "ignored", "like", "class", "stem", "also", "classes", "optional", "weights")


class Conversion(NamedTuple):
    """The way to read and to write a key.

    Attributes:
        read: method of a reader, called with the key and its other spellings.
        write: from the value of a ModelConfig to that of the key.
        is_optional: a key without a value leaves the default of the ModelConfig.
    """

    read: Callable[..., Any]
    write: Callable[[Any], Any] = lambda value: value
    is_optional: bool = False


CONVERSIONS = {
    "int": Conversion(ConfigJsonReader.read_int),
    "float": Conversion(ConfigJsonReader.read_float),
    "positive": Conversion(ConfigJsonReader.read_positive_float),
    "bool": Conversion(ConfigJsonReader.read_bool),
    "null_int": Conversion(ConfigJsonReader.read_optional_int),
    "null_float": Conversion(ConfigJsonReader.read_optional_float),
    "zero_int": Conversion(lambda fields, *names: fields.read_optional_int(*names) or 0),
    "given_int": Conversion(ConfigJsonReader.read_optional_int, is_optional=True),
    "given_floats": Conversion(
        lambda fields, name: fields.read_float_list(name) or None, list, is_optional=True
    ),
    # Experts that are balanced otherwise have no weight of a loss.
    "weight": Conversion(ConfigJsonReader.read_float, lambda value: value or 0.0),
    # MPT's class takes a whole number for a rate.
    "whole": Conversion(ConfigJsonReader.read_float, int),
    # Without a range of their own, tables have that of the other parameters.
    "factor": Conversion(
        ConfigJsonReader.read_positive_float, lambda value: 1.0 if value is None else value
    ),
    "activation": Conversion(read_activation, get_activation_name),
    "gated": Conversion(read_gated_kind, get_activation_name),
}


class Special(NamedTuple):
    """Fields that a table of keys cannot say.

    Attributes:
        read: puts values into those of a ModelConfig.
        write: puts keys into those of a config.json; None where there is nothing to write.
    """

    read: Callable[..., None]
    write: Callable[..., None] | None = None


SPECIALS = {
    "full_attention": Special(read_full_attention),
    "every_window": Special(read_every_window, write_every_window),
    "switched_window": Special(read_switched_window, write_switched_window),
    "late_windows": Special(read_late_windows, write_layer_windows),
    "early_windows": Special(read_early_windows, write_layer_windows),
    "windows_between": Special(read_windows_between, write_windows_between),
    "windows_from": Special(read_windows_from, write_windows_from),
    "windows_with_rope": Special(read_windows_with_rope, write_windows_with_rope),
    "linear_layers": Special(read_linear_layers, write_linear_layers),
    "olmo_layers": Special(read_olmo_layers, write_olmo_layers),
    "optional_theta": Special(read_optional_theta, write_optional_theta),
    "kimi_layers": Special(read_kimi_layers, write_kimi_layers),
    "kimi_experts": Special(read_kimi_experts, write_kimi_experts),
    "mamba_layers": Special(read_mamba_layers, write_mamba_layers),
    "nemotron_layers": Special(read_nemotron_layers, write_nemotron_layers),
    "step_limits": Special(read_step_limits, write_step_limits),
    "falcon_h1_mixer": Special(read_falcon_h1_mixer, write_falcon_h1_mixer),
    "projection_factors": Special(read_projection_factors, write_projection_factors),
    "granite_layers": Special(read_granite_layers, write_granite_layers),
    "granite_feed_forward": Special(read_granite_feed_forward, write_granite_feed_forward),
    "multipliers": Special(read_multipliers, write_multipliers),
    "optional_rope": Special(read_optional_rope, write_optional_rope),
    "layers_without_rope": Special(read_layers_without_rope, write_layers_without_rope),
    "rope": Special(read_rope_section, write_rope_section),
    "rope_with_yarn": Special(read_rope_with_yarn, write_rope_section),
    "rope_of_axes": Special(read_rope_of_axes, write_rope_section),
    "rope_of_two_kinds": Special(read_rope_of_two_kinds, write_rope_of_two_kinds),
    "rope_of_channels": Special(read_rope_of_channels, write_rope_of_channels),
    "score_scale": Special(read_score_scale, write_score_scale),
    "four_times": Special(read_four_times, write_four_times),
    "falcon_branches": Special(read_falcon_branches, write_falcon_branches),
    "sparse_layers": Special(read_sparse_layers, write_sparse_layers),
    "dense_first": Special(read_dense_first, write_dense_first),
    "layers_between": Special(read_layers_between, write_layers_between),
    "expert_groups": Special(read_expert_groups, write_expert_groups),
    "latent_heads": Special(read_latent_heads, write_latent_heads),
    "indexed_layers": Special(read_indexed_layers),
    "undivided_heads": Special(read_undivided_heads),
    "dbrx_sections": Special(read_dbrx_sections, write_dbrx_sections),
    "bert_head": Special(read_bert_head, write_bert_head),
    "positions_after_padding": Special(read_positions_after_padding, write_positions_after_padding),
    "divided_heads": Special(read_divided_heads),
    "image_positions": Special(read_image_positions),
    "image_head": Special(read_image_head, write_image_head),
    "t5_stacks": Special(read_t5_stacks, write_t5_stacks),
    "t5_feed_forward": Special(read_t5_feed_forward, write_t5_feed_forward),
    "encoder_sizes": Special(read_encoder_sizes, write_encoder_sizes),
    "two_vocabularies": Special(read_two_vocabularies, write_two_vocabularies),
}


@dataclass(frozen=True)
class Family:
    """One model type of the table.

    Attributes:
        name: model type.
        table: its entry, with those that it is like.
    """

    name: str
    table: Values

    @property
    def architecture(self) -> str:
        """The usual class."""
        return str(self.table.get("class") or next(iter(self.table["classes"])))

    @property
    def has_weights(self) -> bool:
        """Its weights are converted, by the mapping of `llmsys/convert/family_mappings.py`."""
        return bool(self.table.get("weights", True))

    @property
    def defaults(self) -> Values:
        """Values of keys that a file leaves out."""
        values: Values = self.table["defaults"]
        return values

    def read(self, fields: ConfigJsonReader) -> Values:
        """Convert a config.json to values of a ModelConfig.

        Args:
            fields: reader of the config.json, which collects the problems.

        Returns:
            Values for ModelConfig, not yet validated.
        """
        values: Values = {}
        for path, value in self.table["values"].items():
            _put_value(values, path, value)
        for keys, row in self.table["keys"].items():
            _read_row(fields, values, keys.split(), *row)
        self._check_classes(fields, values)
        for name, options in self.table["special"].items():
            SPECIALS[name].read(fields, values, **options)
        self._check_keys(fields, values)
        fields.close_sections()
        return values

    def _check_classes(self, fields: ConfigJsonReader, values: Values) -> None:
        """Check `architectures`; where it tells heads apart, put the kind of the head."""
        classes = self.table.get("classes")
        if classes is None:
            stem = self.table.get("stem", self.architecture.removesuffix("ForCausalLM"))
            also = self.table.get("also", ())
            check_decoder_class(fields, stem, values["tie_word_embeddings"], *also)
            return
        kind = read_architecture(fields, classes, next(iter(classes.values())))
        _put_value(values, "head.kind", kind)

    def _check_keys(self, fields: ConfigJsonReader, values: Values) -> None:
        """Check the keys that are supported at some values only, or not converted at all."""
        is_pair = values.get("family") == "encoder_decoder"
        check_common_keys(fields, encoder_decoder=is_pair)
        for key, (legal, why) in self.table["only"].items():
            section, last = fields.get_key(key)
            section.require_value(last, *(_resolve_value(values, one) for one in legal), why=why)
        for key in self.table["ignored"]:
            section, last = fields.get_key(key)
            section.ignore_keys(last)
        for key, text in self.table["notes"].items():
            section, last = fields.get_key(key)
            section.add_note(last, text)

    def write(self, model: Values) -> Values:
        """Convert a model to a config.json.

        Args:
            model: dumped ModelConfig, with an encoder where there is one.

        Returns:
            Keys of the config.json, without those that every model type has.

        Raises:
            KeyError, TypeError, AttributeError: the model lacks what the family needs.
        """
        keys: Values = {}
        optional = self.table.get("optional")
        absent = optional if optional is not None and model[optional] is None else None
        for names, (paths, conversion, *_) in self.table["keys"].items():
            known = [path for path in paths.split() if path.split(".")[0] != absent]
            if known:
                value = _write_value(conversion, _get_value(model, known[-1]))
                _put_value(keys, names.split()[0], value)
        if absent is None:
            for key, value in self.table["writes"].items():
                _put_value(keys, key, _resolve_value(model, value))
        for name, options in self.table["special"].items():
            if (write := SPECIALS[name].write) is not None:
                write(model, keys, **options)
        classes = self.table.get("classes", {})
        if len(set(classes.values())) > 1:
            keys["architectures"] = [_select_class(classes, model["head"])]
        return keys


def _select_class(classes: Mapping[str, str], head: Values) -> str:
    wanted = "pretraining" if head.get("next_sentence") else head["kind"]
    return next((name for name, kind in classes.items() if kind == wanted), next(iter(classes)))


def _read_row(
    fields: ConfigJsonReader,
    values: Values,
    keys: list[str],
    paths: str,
    conversion: str | dict[bool, Any],
    *default: Any,
) -> None:
    """Read one key, under any of its spellings, into one or several fields."""
    section, last = fields.get_key(keys[0])
    if default:
        section.defaults = {last: default[0]} | section.defaults
    if isinstance(conversion, dict):
        value = conversion[section.read_bool(last)]
    else:
        value = CONVERSIONS[conversion].read(section, last, *keys[1:])
        if value is None and CONVERSIONS[conversion].is_optional:
            return
    for path in paths.split():
        _put_value(values, path, value)


def _write_value(conversion: str | dict[bool, Any], value: Any) -> Any:
    if isinstance(conversion, str):
        return CONVERSIONS[conversion].write(value)
    return _is_value(conversion[True], value)


def _is_value(wanted: Any, value: Any) -> bool:
    """Return whether a value of a model is the wanted one; of a section, its kind."""
    if isinstance(wanted, dict):
        return bool(value["kind"] == wanted["kind"])
    return bool(value == wanted)


def _put_value(values: Values, path: str, value: Any) -> None:
    *sections, last = path.split(".")
    for name in sections:
        values = values.setdefault(name, {})
    values[last] = value


def _get_value(values: Values, path: str) -> Any:
    """Return a field of a model; None for what other ways to balance experts do not have."""
    *sections, last = path.split(".")
    for name in sections:
        values = values[name]
    return values.get(last) if sections[-1:] == ["balance"] else values[last]


def _resolve_value(values: Values, given: Any) -> Any:
    """Return a value of the table; `=path` is that field of the model, None where it is left
    out.
    """
    if not (isinstance(given, str) and given.startswith("=")):
        return given
    *sections, last = given[1:].split(".")
    for name in sections:
        values = values[name]
    return values.get(last)


def _load_families() -> dict[str, Family]:
    # libyaml takes 20 ms, the parser in Python 200 ms
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load(FILE.read_text("utf-8"), loader)  # both are safe loaders
    return {
        name: Family(name, _merge_entry(entries, name))
        for name in entries
        if not name.startswith("_")
    }


def _merge_entry(entries: Mapping[str, Values], name: str) -> Values:
    """Return an entry of the table together with those that it is like."""
    merged: Values = {part: {} for part in MAPPINGS} | {"ignored": []}
    entry = entries[name]
    for other in [*(_merge_entry(entries, base) for base in entry.get("like", ())), entry]:
        for part, given in other.items():
            if part not in PARTS:
                raise ValueError(f"{FILE.name}: {name}: {part!r} is unknown. Known: {PARTS}.")
            if part == "ignored":
                merged[part] = merged[part] + given
            elif part in MAPPINGS:
                merged[part] = merged[part] | given
            else:
                merged[part] = given
    return merged


# In the order in which a model is tried, so that the simplest type that can express it is written.
FAMILIES = _load_families()
