"""A training program as data: its kernels, overlaps, recomputation and memory, with sources and
fitted constants.

Reads a YAML profile: one that came with llmsys (`programs/`), or one that a user wrote. `base:`
names the profile whose values it changes.

Invariants:
- An unknown program is rejected by name; no other profile is used instead.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, assert_never

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from llmsys.config.engine import DeepSpeedEngineConfig, EngineConfig, TorchEngineConfig
from llmsys.config.loading.merge import ConfigLayer
from llmsys.config.loading.validation_errors import build_config_error
from llmsys.config.run import RunConfig
from llmsys.config.section import Section, raise_violations
from llmsys.errors import ConfigError, Violation
from llmsys.estimate.device_profile import ModelClass, read_profile_values
from llmsys.estimate.software_profile import MemoryProfile, SoftwareProfile
from llmsys.storage.paths import require_local_path

FOLDER = Path(__file__).with_name("programs")
# Profiles may be built on each other; no shipped one is more than three deep.
MAX_BASES = 8
# The profile of a program that nobody named: rows of such programs tell no factor of their own.
UNKNOWN_PROGRAM = "unknown"
# Who may shard what of a published layout. run: as the config says. fsdp_whole: fsdp with gradients
# that are summed whole over micro-batches.
EngineChoice = Literal["run", "zero1", "fsdp", "fsdp_whole"]


class ProgramFit(Section):
    """Constants fitted on published steps, and the error on sources that were held out, one at a
    time.

    `tools/bench/estimates.py --write` writes it.
    """

    factor: float = Field(gt=0, description="Measured / modelled time of a step.")
    spread: float | None = Field(
        None,
        ge=0,
        description="Standard deviation of the logarithm of measured / modelled; none: that of "
        "the class.",
    )
    between: float | None = Field(
        None,
        ge=0,
        description="Part of the spread that is between programs, and remains unknown of this one; "
        "none: that of the class.",
    )
    rows: tuple[str, ...] = Field(description="Published rows that the factor was fitted on.")
    held_out_error: float | None = Field(
        None,
        ge=0,
        description="Median error of P50 on rows of sources left out of the fit, one source at a "
        "time.",
    )
    held_out_coverage: float | None = Field(
        None, ge=0, le=1, description="Share of those rows between P10 and P90."
    )


class ProgramProfile(Section):
    """A training program, as far as time and memory depend on it besides the config."""

    name: str = Field(min_length=1, description="Display name.")
    description: str = Field(
        min_length=1, description="Versions and years that the profile describes."
    )
    time: SoftwareProfile = Field(
        SoftwareProfile(), description="Kernels, overlaps and recomputation."
    )
    memory: dict[str, str] = Field(
        {}, description="Fields of MemoryProfile that differ from llmsys on a GPU."
    )
    pipelined_memory: dict[str, str] = Field({}, description="Further ones under a pipeline.")
    engine: EngineChoice = Field(
        "run",
        description="Sharding without a pipeline: fsdp, fsdp_whole, zero1, or run: engine.kind of "
        "the config.",
    )
    pipelined_engine: EngineChoice = Field("run", description="Sharding under a pipeline.")
    fit: dict[ModelClass, ProgramFit] = Field(
        {},
        description="Fitted constants by class of model; a class without one uses that of all "
        "programs.",
    )
    sources: dict[str, str] = Field({}, description="Sources of the values, by field.")
    assumed: dict[str, str] = Field(
        {},
        description="Fields of memory whose value no source gives, with the reason for it; `plan "
        "--check` prints them.",
    )

    @model_validator(mode="after")
    def _check_memory(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        for key, values in (("memory", self.memory), ("pipelined_memory", self.pipelined_memory)):
            yield from find_memory_violations(key, values)
        for name in sorted(self.assumed.keys() - self.memory.keys() - self.pipelined_memory.keys()):
            yield Violation(
                f"assumed.{name}",
                f"assumed.{name} names no value of memory or pipelined_memory. Give the value, or "
                "remove it.",
            )

    @property
    def is_own(self) -> bool:
        """True for llmsys, whose layout and engine the config gives."""
        return self.engine == "run"

    def build_memory_profile(self, stages: int = 1, chunks: int = 1) -> MemoryProfile:
        """Build the memory profile under a number of pipeline stages, each in chunks.

        Args:
            stages: ranks of the pipeline.
            chunks: parts of the model on each.

        Returns:
            The profile.
        """
        values: dict[str, Any] = self.memory | (self.pipelined_memory if stages > 1 else {})
        return MemoryProfile(**values, pipeline=stages, pipeline_chunks=chunks)

    def select_engine(self, config: RunConfig, stages: int) -> EngineConfig:
        """Return the engine section that shards as the program does."""
        choice = self.pipelined_engine if stages > 1 else self.engine
        match choice:
            case "run":
                return config.engine
            case "zero1":
                return DeepSpeedEngineConfig(zero_stage=1)
            case "fsdp":
                return TorchEngineConfig(data_parallel="fsdp")
            case "fsdp_whole":
                return TorchEngineConfig(data_parallel="fsdp", gradient_accumulation="whole")
            case unreachable:
                assert_never(unreachable)


def find_memory_violations(key: str, values: Mapping[str, str]) -> Iterator[Violation]:
    """Yield a violation for each unknown name or value among fields of MemoryProfile."""
    known = sorted(
        field.name
        for field in fields(MemoryProfile)
        if field.type is not int and field.name != "capability"
    )
    unknown = [name for name in values if name not in known]
    for name in unknown:
        yield Violation(
            f"{key}.{name}",
            f"{key}.{name} is no field of a memory profile. Use {', '.join(known)}.",
        )
    try:
        TypeAdapter(MemoryProfile).validate_python(
            {name: values[name] for name in values if name not in unknown}
        )
    except ValidationError as error:
        for one in error.errors(include_url=False):
            rule = one["msg"].replace("Input should be", "is not one of its values. Use")
            yield Violation(f"{key}.{one['loc'][0]}", f"{one['input']} {rule}.")


def list_program_names() -> list[str]:
    """List the profiles that came with llmsys.

    Returns:
        Names that `load_program_profile` takes, sorted.
    """
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_program_profile(name: str) -> ProgramProfile:
    """Load the profile of a training program.

    Args:
        name: name of a shipped profile, or path of a YAML file.

    Returns:
        The validated profile.

    Raises:
        ConfigError: unknown name (with the known ones), or a wrong field in a file.
    """
    if (FOLDER / f"{name}.yaml").is_file():
        return _load_packaged_profile(name)
    if not require_local_path(name, "program").is_file():
        raise ConfigError(_format_unknown_program(name))
    return _load_profile(Path(name))


def load_own_program(config: RunConfig) -> ProgramProfile:
    """Load the profile of llmsys under a config.

    Args:
        config: config of a run with `train.compile` resolved.

    Returns:
        llmsys for compiled blocks, else llmsys-eager.
    """
    return load_program_profile("llmsys" if config.train.compile == "block" else "llmsys-eager")


@cache
def _load_packaged_profile(name: str) -> ProgramProfile:
    return _load_profile(FOLDER / f"{name}.yaml")


def load_packaged_profiles_again() -> None:
    """Read the shipped profiles again at their next use, after one was written."""
    _load_packaged_profile.cache_clear()


def _load_profile(path: Path) -> ProgramProfile:
    values, lines = _read_values(path, MAX_BASES)
    try:
        return ProgramProfile.model_validate(values)
    except ValidationError as error:
        origins = {keys: f"{path.name}:{line}" for keys, line in lines.items()}
        raise build_config_error(
            error, ProgramProfile, ConfigLayer(values, origins), path.name
        ) from None


def _read_values(path: Path, bases: int) -> tuple[dict[str, Any], dict[Any, int]]:
    """Return the values of a profile over those of its base, and the lines of its file."""
    values, lines = read_profile_values(path)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path.name} is not a program profile. Start with `base: llmsys` and `name: MINE`."
        )
    base = values.pop("base", None)
    if base is None:
        return values, lines
    if not bases:
        raise ConfigError(
            f"{path.name}: base={base} is the last of more than {MAX_BASES} bases. Remove a circle."
        )
    found = FOLDER / f"{base}.yaml"
    found = found if found.is_file() else path.parent / require_local_path(str(base), "base")
    if not found.is_file():
        raise ConfigError(f"{path.name}: {_format_unknown_program(str(base))}")
    below, _ = _read_values(found, bases - 1)
    # Rows of another program are no fit of this one.
    below.pop("fit", None)
    merged = below | {
        key: below.get(key, {}) | value if isinstance(value, dict) and key != "fit" else value
        for key, value in values.items()
    }
    return merged, lines


def _format_unknown_program(name: str) -> str:
    known = list_program_names()
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"{name!r} has no program profile, and no other profile is used instead.{hint} Known: "
        f"{', '.join(known)}. Write a YAML file with `base:` one of them and the fields that "
        "differ, and give its path."
    )
