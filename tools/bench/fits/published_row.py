"""A published measurement and the command line of `llmsys` that prices it; nothing else prices it
here.

Reads data/published_tables.yaml (devices, shapes), and configs of published models in data/models/.
"""

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import yaml

from llmsys.config.loading.load import load_model_config, read_config
from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError, LlmsysError
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.model_tensors import count_parameters
from llmsys.launch.commands.estimate_request import (
    build_pricing_request,
    build_program_run,
    compute_estimate,
)
from llmsys.launch.main import build_parser

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "tests" / "data" / "estimate"
MODELS = Path(__file__).resolve().parent / "data" / "models"
TABLES = Path(__file__).resolve().parent / "data" / "published_tables.yaml"
Row = dict[str, Any]
Kind = Literal["step", "run", "memory"]


@dataclass(frozen=True)
class PublishedRow:
    """One measured number: seconds of a step, accelerator-hours of a run, or GiB of the fullest
    rank.

    `source` is the report; rows of one source are held out together. `words` follow `llmsys`.
    """

    name: str
    source: str
    words: tuple[str, ...]
    measured: float
    kind: Kind = "step"

    @property
    def command(self) -> str:
        """The line to type."""
        return shlex.join(["llmsys", *self.words])


@cache
def run_estimate(words: tuple[str, ...]) -> dict[str, Any]:
    """Return what `llmsys estimate … --json` prints, by the function behind it.

    Args:
        words: arguments of the command, the verb first.

    Returns:
        The values.
    """
    arguments = build_parser(words[0]).parse_intermixed_args(words[1:])
    with redirect_stdout(StringIO()):
        return compute_estimate(arguments)[1].model_dump(exclude_unset=True)


@cache
def estimate_printed_step(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of `run_estimate` that a step's price needs, without memory and FLOPs.

    Args:
        words: arguments of the command, the verb first; with --program.

    Returns:
        The same values under `parameters`, `batch` and `time`.
    """
    arguments = build_parser(words[0]).parse_intermixed_args(words[1:])
    resolved = read_config(arguments.config, arguments.overrides)
    request = build_pricing_request(arguments)
    planned = build_program_run(resolved, arguments, request)
    assert request is not None, "a published step has a device"
    assert planned is not None, "a published step has a program"
    step = planned.estimate_step(request.device, tuple(arguments.documents))
    counts = count_parameters(planned.config.model)
    return {
        "parameters": {"active": {"all": counts.active.all}, "total": counts.total},
        "batch": {
            "tokens": planned.config.batch.tokens_per_step,
            "sequence_length": planned.config.batch.sequence_length,
        },
        "time": step.to_output().model_dump(),
    }


@cache
def read_tables() -> Row:
    """Return data/published_tables.yaml."""
    values: Row = yaml.safe_load(TABLES.read_text(encoding="utf-8"))
    return values


def load_shapes() -> dict[str, dict[str, int]]:
    """Return the shapes and memory settings of Korthikanti's models, by name."""
    shapes: dict[str, dict[str, int]] = read_tables()["shapes"]
    return shapes


def find_model_words(name: str, row: Row) -> list[str]:
    """Return CONFIG and overrides of a model by its published name, or of a dense one of its size.

    Args:
        name: as a table writes it, with remarks in brackets or behind a blank.
        row: the row; `params_active` gives the size of a dense model without a config.

    Returns:
        Arguments of a verb.
    """
    plain = re.sub(r"\(.*\)| .*", "", name).lower()
    if (MODELS / f"{plain}.yaml").is_file():
        return [str((MODELS / f"{plain}.yaml").relative_to(ROOT))]
    try:
        load_model_config(f"model/{plain}")
    except LlmsysError:
        if "params_active" not in row:
            raise
        # 128 channels of width per layer (Kaplan 2020, figure 5)
        layers = max(2, round((float(row["params_active"]) / (12 * 128**2)) ** (1 / 3)))
        return list_gpt_words(128 * layers, layers, layers, 50_304)
    return [f"model/{plain}"]


def list_gpt_words(hidden: int, layers: int, heads: int, vocabulary: int) -> list[str]:
    """Return CONFIG and overrides of GPT-2's architecture in a size."""
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }
    return [
        str((MODELS / "gpt.yaml").relative_to(ROOT)),
        *(f"{key}={value}" for key, value in sizes.items()),
    ]


def load_words_model(words: Sequence[str]) -> ModelConfig:
    """Return the model of CONFIG and overrides."""
    return load_model_config(
        str(ROOT / words[0]) if "/models/" in words[0] else words[0], words[1:]
    )


def resolve_device_name(name: str) -> str:
    """Return our name of a device; raise ConfigError when it has no profile."""
    ours: str = read_tables()["devices"].get(name, name.lower())
    load_device_profile(ours)
    return ours


def list_run_words(
    model: Sequence[str],
    length: int,
    sequences: int,
    *,
    micro: int | None = None,
    recompute: str | None = None,
    precision: str = "bf16",
    tokens: float = 0,
) -> list[str]:
    """Return `estimate`, CONFIG and the overrides of a run.

    Args:
        model: CONFIG and overrides of the model.
        length: tokens of a sequence.
        sequences: sequences of a step.
        micro: sequences of a forward pass of a rank; None: searched.
        recompute: train.activation_checkpoint; None: searched.
        precision: train.precision.
        tokens: tokens of the run; 0: none is known.

    Returns:
        Arguments of `llmsys`.
    """
    overrides = [
        f"batch.sequence_length={length}",
        f"batch.sequences={sequences}",
        f"train.precision={precision}",
    ]
    longest = load_words_model(model).max_position_embeddings
    if longest is not None and length > longest:
        overrides.append(f"max_position_embeddings={length}")
    overrides += [] if micro is None else [f"batch.micro_sequences={micro}"]
    overrides += [] if recompute is None else [f"train.activation_checkpoint={recompute}"]
    overrides += [f"train.tokens={int(tokens)}"] if tokens else []
    return ["estimate", *model, *overrides]


def build_gpt_model(hidden: int, layers: int, heads: int, vocabulary: int) -> ModelConfig:
    """Return GPT-2's architecture in that size, as in Megatron's tables."""
    return load_words_model(list_gpt_words(hidden, layers, heads, vocabulary))


def read_json(path: Path) -> Any:
    """Return the value of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            f"{path} is no JSON: {error}. Give rows as in tests/data/estimate."
        ) from None
