"""Run `llmsys scale`: recommend model size and tokens for a compute budget, or fit a scaling law
to runs.
"""

import argparse
import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError
from llmsys.storage.paths import parse_local_path, require_local_path

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmsys.config.scaling import ScalingLawConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words: key=value, or `fit` and then runs."""
    from llmsys.config.scaling import ScalingLawConfig  # for the help of its keys

    known = "\n".join(
        f"  {name:<16} {field.description}" for name, field in ScalingLawConfig.model_fields.items()
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"keys:\n{known}\n\n{parser.epilog}"
    parser.add_argument(
        "words",
        metavar="WORD",
        nargs="+",
        help="budget=… and limits; or `fit`, then run folders and CSV files",
    )
    parser.add_argument(
        "--output",
        type=parse_local_path,
        default=Path("scaling.html"),
        help="fit: HTML file for the plots (default: %(default)s)",
    )
    parser.add_argument(
        "--html",
        type=parse_local_path,
        metavar="FILE",
        help="write a page of all laws; fit: another name of --output",
    )
    parser.add_argument(
        "--resamples",
        type=int,
        default=200,
        help="fit: number of bootstrap resamples for the intervals (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the table of all laws, or the fitted law; with --json, as one object."""
    if arguments.words[0] == "fit":
        return _fit_law(arguments)
    config = _parse_config(arguments.words)
    from llmsys.estimate.scaling.law_comparison import compare_laws
    from llmsys.estimate.scaling.law_tables import format_law_comparison

    result = compare_laws(config, _compute_budget(config))
    if arguments.html is not None:
        from llmsys.report.scaling_page import write_scale_page

        page = write_scale_page(result, arguments.html)
        result = result.model_copy(update={"page": str(page)})
    _print_output(result, format_law_comparison(result), as_json=arguments.json)
    return 0


def _parse_config(words: list[str]) -> "ScalingLawConfig":
    from pydantic import ValidationError

    from llmsys.config.loading.merge import read_overrides
    from llmsys.config.loading.validation_errors import build_config_error
    from llmsys.config.scaling import ScalingLawConfig

    layer = read_overrides(words)
    try:
        return ScalingLawConfig.model_validate(layer.values)
    except ValidationError as error:
        raise build_config_error(error, ScalingLawConfig, layer, "llmsys scale") from None


def _compute_budget(config: "ScalingLawConfig") -> Any:
    from llmsys.estimate.scaling.law_comparison import Accelerator, convert_budget_to_flops

    if config.parsed_budget[1] == "FLOPs":
        return convert_budget_to_flops(config, None)
    from llmsys.estimate.device_profile import load_device_profile

    assert config.device is not None, "the config refuses hours without a device"
    device = load_device_profile(config.device)
    if device.watts is None:
        raise ConfigError(
            f"{device.name} has no watts in its profile, which an energy budget needs. Add watts "
            "to the file."
        )
    return convert_budget_to_flops(
        config, Accelerator(device.name, device.get_peak_flops("bf16"), device.watts)
    )


def _fit_law(arguments: argparse.Namespace) -> int:
    # intervals end at 5 and 95 %, and 5 % of fewer than 20 resamples is not one of them
    if arguments.resamples < 20:
        raise ConfigError(
            f"--resamples {arguments.resamples} is too few for an interval. Use 20 or more "
            "(default: 200)."
        )
    _check_fit_words(arguments.words[1:])
    from llmsys.estimate.scaling.law_fit import fit_law, load_training_runs
    from llmsys.estimate.scaling.law_tables import build_fit_output, format_fit

    folders = [
        require_local_path(word, "llmsys scale fit")
        for word in arguments.words[1:]
        if not word.startswith("budget=")
    ]
    budgets = [
        _parse_config([word]).parsed_budget
        for word in arguments.words[1:]
        if word.startswith("budget=")
    ]
    if any(unit != "FLOPs" for _, unit in budgets):
        raise ConfigError("llmsys scale fit takes budgets in FLOPs, such as budget=1e21.")
    points = load_training_runs(folders)
    found = fit_law(points, arguments.resamples)
    from llmsys.report.scaling_page import write_scaling_report

    page = write_scaling_report(points, found, arguments.html or arguments.output)
    result = build_fit_output(found, [flops for flops, _ in budgets], str(page))
    _print_output(result, format_fit(result), as_json=arguments.json)
    return 0


def _check_fit_words(words: list[str]) -> None:
    """Raise ConfigError for a key that a fit does not have; a file of that name is a source."""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.isidentifier() and name != "budget" and not Path(word).exists():
            meant = difflib.get_close_matches(name, ("budget",))
            advice = f"Did you mean budget={value}?" if meant else "Leave it out."
            raise ConfigError(
                f"{word} changes nothing in llmsys scale fit, which takes run folders, CSV files "
                f"and budget=FLOPs. {advice}"
            )


def _print_output(output: "BaseModel", text: str, *, as_json: bool) -> None:
    # a page is a key only where there is one
    print(json.dumps(output.model_dump(exclude_unset=True)) if as_json else text)
