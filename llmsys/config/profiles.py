"""Which profile a language has: a file of configs/data/languages, or one that the config names.

Reads YAML files, gives `LanguageProfile`s by code. `default` is the profile of languages that have none.
"""

import difflib
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from llmsys.config.language import LanguageConfig
from llmsys.config.language_profile import DEFAULT, LanguageProfile
from llmsys.config.lookup import PROFILES, list_config_roots, format_path, find_config
from llmsys.config.yaml_text import parse_yaml
from llmsys.errors import ConfigError


def list_profile_codes() -> list[str]:
    """Every code that has a profile of its own."""
    found = {path.stem for root in list_config_roots() for path in (root / PROFILES).glob("*.yaml")}
    return sorted(found - {DEFAULT})


def read_profile(name: str) -> LanguageProfile:
    """The profile of a path or a name such as `data/languages/zh`.

    Raises ConfigError for a missing file and for every value that it must not hold.
    """
    path = find_config(name, Path.cwd(), "data.language.profiles")
    return _read_profile_file(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _read_profile_file(path: Path, changed: int) -> LanguageProfile:
    values, lines = parse_yaml(path.read_text(encoding="utf-8"), format_path(path))
    try:
        return LanguageProfile.model_validate(values or {})
    except ValidationError as error:
        first = error.errors()[0]
        keys = tuple(str(key) for key in first["loc"])
        line = next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), 1)
        raise ConfigError(f"{format_path(path)}:{line}: {'.'.join(keys) or 'profile'}: {first['msg']}.") from None


def load_language_profiles(config: LanguageConfig, known: Collection[str]) -> dict[str, LanguageProfile]:
    """The profiles of the languages that stay, by code, and that of all others as `default`.

    Args:
        config: which languages stay and whose profiles are the user's.
        known: codes that the identifier may give.

    Raises ConfigError for a code that no document can have, and for one without a profile.
    """
    own = list_profile_codes()
    for code in (*config.keep, *config.profiles):
        if code not in known:
            raise ConfigError(_format_unknown_code(code, config, known))
        if code not in own and code not in config.profiles:
            raise ConfigError(
                f"data.language.keep: {code} has no profile in configs/{PROFILES}, and its pages are not English. "
                f"{_format_closest_codes(code, own)} Write a profile, or take the one for languages without: "
                f"data.language.profiles: {{{code}: {PROFILES}/{DEFAULT}}}."
            )
    codes = config.keep or sorted({*own, *config.profiles} & set(known))
    named = {code: config.profiles.get(code, f"{PROFILES}/{code}") for code in codes}
    return {code: read_profile(name) for code, name in {**named, DEFAULT: f"{PROFILES}/{DEFAULT}"}.items()}


def _format_unknown_code(code: str, config: LanguageConfig, known: Collection[str]) -> str:
    where = "keep" if code in config.keep else "profiles"
    return f"data.language.{where}: the identifier {config.kind} never says {code!r}. {_format_closest_codes(code, known)}"


def _format_closest_codes(code: str, codes: Collection[str]) -> str:
    """The codes that look most like one."""
    if code == "no":
        return "Norwegian is nb (Bokmål) or nn (Nynorsk)."
    named = [one for one in list_profile_codes() if read_profile(f"{PROFILES}/{one}").name.lower() == code.lower()]
    if named:
        return f"{code.capitalize()} is {named[0]}."
    close = difflib.get_close_matches(code.lower(), sorted(codes), n=3, cutoff=0.3)
    close = close or [one for one in sorted(codes) if one[:1] == code[:1].lower()][:3] or sorted(codes)[:3]
    return f"The nearest codes are {', '.join(close)}."
