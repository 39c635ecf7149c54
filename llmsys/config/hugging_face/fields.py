"""A config.json, read so that no key is overlooked.

Gives typed values by name and remembers every key that somebody asked for. Promises that `finish` names all that is
wrong at once: values of a wrong type, values that cannot be built, and every key that nobody understood.
"""

import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any

from llmsys.config.hugging_face.names import HARMLESS
from llmsys.config.rule import Broken, listed
from llmsys.errors import ConfigError
from llmsys.log import logger

_MISSING: Any = object()
_log = logger(__name__)


class Fields:
    """The keys of one mapping, with the defaults of its model type for those that are left out.

    Getters take the key and other spellings of it. A value of a wrong type is noted as a problem, and some legal value
    is given back, so that one reading finds every problem.
    """

    def __init__(self, values: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> None:
        self.values, self.defaults, self.prefix = values, defaults, prefix
        self.asked: set[str] = set()
        self.problems: list[Broken] = []
        self.notes: list[str] = []

    def whole(self, *names: str) -> int:
        """A whole number; null is a problem."""
        found = self._typed(names, _whole, "a whole number")
        return 1 if found is None else int(found)

    def whole_or_none(self, *names: str) -> int | None:
        """A whole number or null."""
        return self._typed(names, _whole, "a whole number", null=True)  # type: ignore[no-any-return]

    def number(self, *names: str) -> float:
        """A finite number."""
        found = self._typed(names, _number, "a finite number")
        return 1.0 if found is None else float(found)

    def number_or_none(self, *names: str) -> float | None:
        """A finite number or null."""
        return self._typed(names, _number, "a finite number", null=True)  # type: ignore[no-any-return]

    def positive(self, *names: str) -> float:
        """A number above 0."""
        value = self.number(*names)
        if value > 0:
            return value
        self.refuse(names[0], f"{value} is not above 0.")
        return 1.0

    def flag(self, *names: str) -> bool:
        """True or false; null counts as false, as it does in Python."""
        return bool(self._typed(names, _flag, "true or false", null=True))

    def word(self, *names: str) -> str:
        """Text."""
        return str(self._typed(names, _text, "text") or "")

    def numbers(self, name: str) -> list[float]:
        """A list of numbers; null counts as an empty one."""
        return self._typed((name,), _list(_number), "a list of numbers", null=True) or []

    def wholes(self, name: str) -> list[int]:
        """A list of whole numbers; null counts as an empty one."""
        return self._typed((name,), _list(_whole), "a list of whole numbers", null=True) or []

    def words(self, name: str) -> list[str]:
        """A list of texts; null counts as an empty one."""
        return self._typed((name,), _list(_text), "a list of texts", null=True) or []

    def section(self, name: str, defaults: dict[str, Any]) -> "Fields":
        """The mapping under `name`; empty when it is left out or null. Hand it to `join` when it is read."""
        values = self._typed((name,), _mapping, "a mapping", null=True)
        return Fields(values or {}, defaults, f"{self.prefix}{name}.")

    def join(self, section: "Fields") -> None:
        """Take over what was found in a nested mapping, its unknown keys included."""
        self.problems += section.problems + section.unknown()
        self.notes += section.notes

    def given(self, name: str) -> bool:
        """Whether the file itself has the key, with a value that is not null."""
        return self.values.get(name) is not None

    def choice(self, name: str, legal: Iterable[str]) -> str:
        """One of the legal words."""
        words, value = list(legal), self.word(name)
        if value in words:
            return value
        self.refuse(name, f"{value!r} is not understood. Known: {listed(words)}.{_close(value, words)}")
        return words[0]

    def only(self, name: str, *legal: Any, why: str) -> None:
        """A key that may be left out, and is understood at these values alone."""
        self.asked.add(name)
        value = self.values.get(name, legal[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in legal):
            shown = listed([_json(one) for one in legal])
            self.refuse(name, f"{_json(value)} is not supported: {why}. Only {shown} can be built.")

    def skip(self, *names: str) -> None:
        """Keys of this model type that change nothing that is built here."""
        self.asked.update(names)

    def note(self, name: str, text: str) -> None:
        """A key that is left out of the model on purpose, and that a person should hear about."""
        self.asked.add(name)
        if self.values.get(name):
            self.notes.append(f"{self.prefix}{name}: {text}")

    def refuse(self, name: str, message: str) -> None:
        """Note one problem."""
        self.problems.append(Broken(self.prefix + name, message))

    def unknown(self) -> list[Broken]:
        """A problem for each key that nobody asked for."""
        known = self.asked | self.defaults.keys()
        return [
            Broken(self.prefix + key, _unknown(key, sorted(known)))
            for key in self.values
            if key not in self.asked and key not in HARMLESS
        ]

    def finish(self, source: str) -> None:
        """Raise a ConfigError with every problem, or log the notes."""
        found = [*self.problems, *self.unknown()]
        if found:
            head = "1 problem" if len(found) == 1 else f"{len(found)} problems"
            lines = [f"{source}: {problem.key}: {problem.message}" for problem in found]
            raise ConfigError("\n  ".join([f"{head} in {source}:", *dict.fromkeys(lines)]))
        for note in self.notes:
            _log.info("%s: %s", source, note)

    def _typed(self, names: tuple[str, ...], read: Callable[[Any], Any], what: str, null: bool = False) -> Any:
        self.asked.update(names)
        given = [name for name in names if name in self.values]
        default = next((self.defaults[name] for name in names if name in self.defaults), None)
        name = given[0] if given else names[0]
        raw = self.values[name] if given else default
        for other in given[1:]:
            if self.values[other] != raw:
                self.refuse(other, f"{_json(self.values[other])} and {name}={_json(raw)} disagree. Keep one of them.")
        if raw is None and null:
            return None
        value = _MISSING if raw is None else read(raw)
        if value is not _MISSING:
            return value
        missing = not given and raw is None
        self.refuse(name, f"is missing. Give {what}." if missing else f"{_json(raw)} is not {what}.")
        return default


def _whole(value: Any) -> Any:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and not isinstance(value, bool) else _MISSING


def _number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else _MISSING


def _flag(value: Any) -> Any:
    return value if isinstance(value, bool) else _MISSING


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else _MISSING


def _mapping(value: Any) -> Any:
    return value if isinstance(value, dict) else _MISSING


def _list(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def reader(value: Any) -> Any:
        entries = [read(one) for one in value] if isinstance(value, list) else [_MISSING]
        return _MISSING if any(one is _MISSING for one in entries) else entries

    return reader


def _json(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    text = text or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _unknown(key: str, known: list[str]) -> str:
    hint = _close(key, known) or " Remove it if it changes nothing that is computed."
    return f"unknown field, and it may change the computation.{hint}"


def _close(value: str, words: list[str]) -> str:
    close = difflib.get_close_matches(value, words, n=1)
    return f" Did you mean {close[0]}?" if close else ""
