"""Run `llmsys list`: name the configs, models, device profiles and rules that ship with llmsys."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

SORTS = ("configs", "models", "devices", "rules")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sort of things to list."""
    parser.add_argument("sort", choices=SORTS, nargs="?", help="what to list (default: all four)")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each; with --json, an object of names and descriptions by sort."""
    found = {
        sort: dict(_iter_entries(sort)) for sort in ([arguments.sort] if arguments.sort else SORTS)
    }
    if arguments.json:
        print(json.dumps(found, ensure_ascii=False))
        return 0
    for number, (sort, entries) in enumerate(found.items()):
        if arguments.sort is None:
            print(("\n" if number else "") + f"{sort}:")
        width = max(map(len, entries), default=0)
        print("\n".join(f"{name:<{width}}  {about}".rstrip() for name, about in entries.items()))
    return 0


def _iter_entries(sort: str) -> Iterator[tuple[str, str]]:
    """Yield (name, description) of each entry."""
    if sort == "devices":
        from llmsys.estimate.device_profile import list_device_names, load_device_profile

        for name in list_device_names():
            profile = load_device_profile(name)
            dtype = "bf16" if "bf16" in profile.peak_flops else next(iter(profile.peak_flops))
            peak = f"{profile.peak_flops[dtype] / 1e12:.4g} TFLOP/s in {dtype}"
            yield name, f"{profile.name}: {profile.memory_bytes / 2**30:.0f} GiB, {peak}"
    elif sort == "rules":
        from llmsys.config.quality_rules import list_rule_sections

        for kind, section in list_rule_sections().items():
            yield kind, (section.__doc__ or "").partition("\n")[0]
    else:
        from llmsys.config.loading.config_files import find_config, list_config_names

        for name in list_config_names():
            if name.startswith("model/") == (sort == "models"):
                yield (
                    name,
                    _read_first_comment(find_config(name, Path.cwd()).read_text(encoding="utf-8")),
                )


def _read_first_comment(text: str) -> str:
    """Return the first line of a config when it is a comment."""
    line = text.partition("\n")[0]
    return line.removeprefix("#").strip() if line.startswith("#") else ""
