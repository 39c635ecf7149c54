"""Variants of a data config, seeds and held-out sets of an ablation, checked before any work.

Reads configs. A variant is a file that is merged over the base.

Invariants:
- Variants differ in `data` alone, and there only in what turns pages into documents.
- Held-out pages follow from sections that no variant changes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.config.data import CrawlConfig
from llmsys.config.loading.load import load_run_config
from llmsys.config.loading.trusted_run import require_trusted_run
from llmsys.config.run import RunConfig
from llmsys.config.tokenizer import FileTokenizerConfig, SentencePieceConfig, WordPieceConfig
from llmsys.data_pipeline.graph.resource_files import require_resource_files
from llmsys.data_pipeline.readers.input_files import find_input_files, find_inputs
from llmsys.errors import ConfigError
from llmsys.train.run_settings import list_changes
from llmsys.vocabulary.tokenizer import load_tokenizer

BASE = "base"
# Held-out sets that every ablation has.
PAGES, KEPT_PAGES = "pages", "kept_by_base"
# Sections of `data` that turn pages into documents: what variants are about.
CHOICES = (
    "url",
    "extract",
    "unicode",
    "language",
    "rules",
    "deduplicate",
    "decontaminate",
    "pii",
)
# Sections that decide which pages are held out, and under which ids.
HELDOUT_SECTIONS = ("inputs", "heldout_inputs", "read", "split")
# Names and places, which the ablation sets itself.
_PLACES = ("name", "folder", "executor")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_SHOWN_CHANGES = 4


@dataclass(frozen=True)
class AblationPlan:
    """Datasets, seeds and held-out sets of an ablation.

    Attributes:
        folder: Folder of everything that it writes.
        base: Config of the base, with its own folders.
        variants: Config of each variant by name, the base first.
        seeds: Values of `run.seed`.
        heldout: Further held-out sets: path, URL or pattern of documents by name.
    """

    folder: Path
    base: RunConfig
    variants: Mapping[str, RunConfig]
    seeds: Sequence[int]
    heldout: Mapping[str, str]

    def get_data(self, name: str) -> CrawlConfig:
        """Return the data section of a variant, with the folder that it has here."""
        data = self.variants[name].data
        assert isinstance(data, CrawlConfig)  # build_plan has checked it
        own = {"name": name, "folder": self.get_data_folder(name)}
        executor = getattr(self.base.data, "executor", data.executor)
        return data.model_copy(update=own | {"executor": executor})

    def get_data_folder(self, name: str) -> Path:
        """Return the dataset folder of a variant, or of a held-out set."""
        return self.folder / "data" / name

    def get_set_folder(self, name: str) -> Path:
        """Return the dataset folder of a held-out set."""
        return self.folder / "heldout" / name

    def get_run_folder(self, name: str, seed: int) -> Path:
        """Return the run folder of a variant and a seed."""
        return self.folder / "runs" / name / f"seed-{seed}"

    def build_config(self, name: str) -> RunConfig:
        """Return the config with which a variant is prepared and trained.

        Args:
            name: A variant; the base trains the tokenizer that all have.

        Returns:
            The config; `run.seed` and `run.folder` are those of the first seed.
        """
        config = self.variants[name]
        run = config.run.model_copy(
            update={
                "name": name,
                "seed": self.seeds[0],
                "folder": self.get_run_folder(name, self.seeds[0]),
            }
        )
        changes: dict[str, Any] = {"run": run, "data": self.get_data(name)}
        if name != BASE:
            changes["tokenizer"] = self.build_shared_tokenizer()
        return config.model_copy(update=changes)

    def build_shared_tokenizer(self) -> Any:
        """Return the tokenizer section of all datasets but the base: the tokenizer that the base
        trains, or the one that its config names.
        """
        if isinstance(self.base.tokenizer, SentencePieceConfig | WordPieceConfig):
            return FileTokenizerConfig(path=self.get_data_folder(BASE) / "tokenizer")
        return self.base.tokenizer


def build_plan(
    base: str,
    variants: Sequence[str],
    overrides: Sequence[str],
    folder: Path,
    num_seeds: int,
    heldout: Sequence[str] = (),
) -> AblationPlan:
    """Load and check everything that an ablation needs.

    Args:
        base: Path or name of the config of the base: data, model and recipe.
        variants: Paths or names of files that are merged over it.
        overrides: `section.key=value` words, for the base and all variants.
        folder: Folder of the ablation.
        num_seeds: Seeds of each variant, from the base's `run.seed` on.
        heldout: Further held-out sets, `NAME=PATH`.

    Returns:
        The plan.

    Raises:
        ConfigError: A config is wrong, a variant changes what must be equal or nothing, or two are
            equal.
        DataError: An input is missing.
    """
    own = load_run_config(base, overrides)
    require_trusted_run(own, "training")
    data = _require_base(base, own)
    loaded = {BASE: own}
    for file in variants:
        name = _name_variant(file, loaded)
        loaded[name] = load_run_config(base, overrides, [file])
        _require_comparable(file, own, loaded[name])
    _require_different(loaded)
    find_input_files(data)
    for config in loaded.values():
        assert isinstance(config.data, CrawlConfig)
        require_resource_files(config.data)
    seeds = range(own.run.seed, own.run.seed + num_seeds)
    return AblationPlan(folder, own, loaded, seeds, _parse_sets(heldout))


def describe_choices(data: CrawlConfig) -> dict[str, Any]:
    """Return the sections of a data config that a variant may change, as plain values."""
    return data.model_dump(mode="json", include=set(CHOICES))


def list_variant_changes(base: CrawlConfig, variant: CrawlConfig) -> dict[str, list[Any]]:
    """List what a variant changes.

    Args:
        base: The data section of the base.
        variant: That of the variant.

    Returns:
        [value in the base, value in the variant] by key below `data`.
    """
    changes = list_changes(describe_choices(base), describe_choices(variant))
    return {key: [before, after] for key, before, after in changes}


def _require_base(name: str, config: RunConfig) -> CrawlConfig:
    """Return the data section of the base; raise ConfigError for a run that cannot be compared."""
    data = config.data
    if not isinstance(data, CrawlConfig):
        raise ConfigError(
            f"{name}: data.kind={data.kind} has no rules to vary. Give a config with "
            "data.kind=crawl."
        )
    if config.objective.kind != "next_token":
        raise ConfigError(
            f"{name}: objective.kind={config.objective.kind} has no bits per byte, by which "
            "variants are compared. Give a config with objective.kind=next_token."
        )
    if not data.heldout_inputs and data.split.heldout_fraction == 0:
        raise ConfigError(
            f"{name}: data.split.heldout_fraction=0 holds out no page, and there would be nothing "
            "to compare on. Set it to 0.05, or name files in data.heldout_inputs."
        )
    if isinstance(config.tokenizer, FileTokenizerConfig):
        pieces = load_tokenizer(config.tokenizer.path, config.tokenizer.eos_token).vocab_size
        if pieces > config.model.vocab_size:
            raise ConfigError(
                f"{name}: model.vocab_size={config.model.vocab_size} is less than the {pieces} "
                f"pieces of {config.tokenizer.path}. Set model.vocab_size={pieces} or more."
            )
    return data


def _name_variant(file: str, known: Mapping[str, RunConfig]) -> str:
    name = Path(file).stem
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{file}: a variant is named after its file, and {name!r} is no name of a folder. Use "
            "letters, digits, dots, hyphens and underscores."
        )
    if name in known:
        what = "the name of the base itself" if name == BASE else "the name of another variant"
        raise ConfigError(f"{file}: {name} is {what}. Give the file another name.")
    return name


def _require_comparable(file: str, base: RunConfig, variant: RunConfig) -> None:
    """Raise ConfigError where a variant changes the model, the recipe or the held-out pages."""
    left_out = {"run", "data"}
    if changes := list_changes(
        base.model_dump(mode="json", exclude=left_out),
        variant.model_dump(mode="json", exclude=left_out),
    ):
        raise ConfigError(
            f"{file}: {_format_changes(changes)}. Variants share model and recipe, and differ in "
            "data alone. Leave it out, or set it in the base."
        )
    if not isinstance(variant.data, CrawlConfig):
        raise ConfigError(
            f"{file}: data.kind is crawl in the base and {variant.data.kind} here. Keep "
            "data.kind=crawl."
        )
    fixed = [
        (key, before, after)
        for key, before, after in _list_data_changes(base, variant)
        if key.split(".")[1] not in (*CHOICES, *_PLACES)
    ]
    if held := [one for one in fixed if one[0].split(".")[1] in HELDOUT_SECTIONS]:
        raise ConfigError(
            f"{file}: {_format_changes(held)}. It decides which pages are held out, and these are "
            "the same for all variants. Leave it out, or set it in the base."
        )
    if fixed:
        raise ConfigError(
            f"{file}: {_format_changes(fixed)}. It changes no document, so there is nothing to "
            "compare. Leave it out, or set it in the base."
        )


def _list_data_changes(base: RunConfig, variant: RunConfig) -> list[tuple[str, Any, Any]]:
    sections = (base.data.model_dump(mode="json"), variant.data.model_dump(mode="json"))
    return list_changes(*sections, "data")


def _format_changes(changes: Sequence[tuple[str, Any, Any]]) -> str:
    shown = [f"{key} is {before} in the base and {after} here" for key, before, after in changes]
    more = len(shown) - _SHOWN_CHANGES
    return "; ".join(shown[:_SHOWN_CHANGES]) + (f"; and {more} more" if more > 0 else "")


def _require_different(loaded: Mapping[str, RunConfig]) -> None:
    """Raise ConfigError for two variants that make the same documents."""
    seen = list[tuple[str, dict[str, Any]]]()
    for name, config in loaded.items():
        assert isinstance(config.data, CrawlConfig)
        choices = describe_choices(config.data)
        for other, theirs in seen:
            if choices == theirs:
                raise ConfigError(
                    f"variants {other} and {name} have the same data config, so there is nothing "
                    "to compare. Leave one out, or change it."
                )
        seen.append((name, choices))


def _parse_sets(words: Sequence[str]) -> dict[str, str]:
    return dict(_iter_sets(words))


def _iter_sets(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    taken = {PAGES, KEPT_PAGES}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not path or not _NAME.fullmatch(name):
            raise ConfigError(
                f"--heldout {word} is not NAME=PATH. Name the set and its documents, such as "
                "wiki=texts/*.jsonl."
            )
        if name in taken:
            raise ConfigError(
                f"--heldout {word}: there is a held-out set {name} already. Use another name."
            )
        taken.add(name)
        find_inputs([path], f"--heldout {name}")
        yield name, path
