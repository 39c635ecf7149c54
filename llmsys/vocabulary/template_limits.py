"""Limits on what a chat template of others may compute, without a clock: equal input gives equal
text or the equal error.

A rendering has a budget of work. Each turn of a loop, call, operator and filter costs one unit, and
one more for every `CHARACTERS_OF_UNIT` characters or entries that it makes. No text or list may be
longer than `MAX_LENGTH`, and what would make a longer one is refused before it runs.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SOURCE = 2**18  # characters; the longest published templates have about 2**14
MAX_LENGTH = 2**24  # characters of a text, entries of a list
MAX_WORK = 1_000_000
MAX_BITS = 4096  # of a whole number
MAX_WIDTH = 10_000  # of padding and indentation
CHARACTERS_OF_UNIT = 1024
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|:[^{}]*\{")
_PADDING = ("ljust", "rjust", "center", "zfill", "expandtabs", "indent", "batch", "slice", "tojson")


class TemplateLimitError(TemplateError):
    """A template that needs more than a limit allows."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with a budget; `start` begins a rendering."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        self.left = MAX_WORK
        super().__init__(**options)
        self.concat = self.join_parts  # type: ignore[method-assign]

    def start(self) -> None:
        """Begin a rendering with the whole budget."""
        self.left = MAX_WORK

    def limit_filters(self) -> None:
        """Let every filter pay; call it once all filters are there."""
        self.filters = {name: self._limit(name, one) for name, one in self.filters.items()}
        self.filters |= {"llmsys_turns": self.count_turns, "llmsys_text": self.count_value}

    def count_value(self, made: Any) -> Any:
        """Take the price of a value from the budget and return the value."""
        size = len(made) if isinstance(made, str | list | tuple | dict) else 0
        _require(size <= MAX_LENGTH, f"a text or list of {size:,}", f"{MAX_LENGTH:,}")
        self.left -= 1 + size // CHARACTERS_OF_UNIT
        _require(self.left >= 0, "loops and calls of more work", f"{MAX_WORK:,} units")
        return made

    def count_turns(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of a loop, each for its price."""
        for value in values:
            self.count_value(None)
            yield value

    def join_parts(self, parts: Iterable[str]) -> str:
        """Join the parts of the output."""
        kept: list[str] = []
        length = 0
        for part in parts:
            length += len(part)
            _require(length <= MAX_LENGTH, "an output of more", f"{MAX_LENGTH:,} characters")
            kept.append(part)
        return self.count_value("".join(kept))  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Run an operator whose result is small enough."""
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    _require_length(len(many) * times)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            _require(bits <= MAX_BITS, f"a number of {bits:,} bits", f"{MAX_BITS:,}")
        if operator == "%" and isinstance(left, str):
            _require_narrow(left)
        return self.count_value(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *values: Any, **named: Any) -> Any:  # noqa: N805
        """Call a macro, function or method whose result is small enough."""
        # the sandbox wraps the methods that format
        method = getattr(__obj, "__wrapped__", __obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_arguments(name, owner, values, named)
        __self.count_value(None)
        return __self.count_value(super().call(__context, __obj, *values, **named))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        _require(len(source) <= MAX_SOURCE, f"{len(source):,} characters", f"{MAX_SOURCE:,}")
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _build_filter("llmsys_turns", cast(nodes.Expr, loop.iter))
        for parent in [tree, *tree.find_all(nodes.Node)]:
            if getattr(parent, "name", "") != "llmsys_text":
                _wrap_concatenations(parent)
        return tree

    def _limit(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(run, "jinja_pass_arg") else 0

        @functools.wraps(run)
        def run_limited(*values: Any, **named: Any) -> Any:
            rest = list(values[first:])
            if name == "join" and not isinstance(rest[0], str | dict):
                rest[0] = list(self.count_turns(rest[0]))
                glue = str(named.get("d", rest[1] if len(rest) > 1 else ""))
                _require_length(sum(len(str(one)) + len(glue) for one in rest[0]))
            elif isinstance(rest[0], str):
                _check_arguments(name, rest[0], rest[1:], named)
            self.count_value(rest[0])
            return self.count_value(run(*values[:first], *rest, **named))

        return run_limited


def _build_filter(name: str, value: nodes.Expr) -> nodes.Filter:
    made = nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)
    made.set_environment(value.environment)  # type: ignore[arg-type]
    return made


def _wrap_concatenations(parent: nodes.Node) -> None:
    for field, value in list(parent.iter_fields()):
        if isinstance(value, nodes.Concat):
            setattr(parent, field, _build_filter("llmsys_text", value))
        elif isinstance(value, list):
            value[:] = [
                _build_filter("llmsys_text", one) if isinstance(one, nodes.Concat) else one
                for one in value
            ]


def _check_arguments(name: str, text: str, values: Iterable[Any], named: dict[str, Any]) -> None:
    """Refuse a method or filter of a text that would make a text that is too long."""
    values = [*values, *named.values()]
    if name in _PADDING:
        for width in values:
            size = width if isinstance(width, int) else len(width) if name == "indent" else 0
            _require(size <= MAX_WIDTH, f"{name} of {size:,}", f"{MAX_WIDTH:,}")
    elif name == "replace" and len(values) > 1:
        _require_length(len(text) + text.count(str(values[0])) * len(str(values[1])))
    elif name == "join":
        _require_length(sum(len(str(one)) + len(text) for one in values[0]))
    elif name in ("format", "format_map"):
        _require_narrow(text)


def _require_narrow(text: str) -> None:
    _require(_WIDE_FORMAT.search(text) is None, f"the format {text[:40]!r}", "four digits")


def _require_length(length: int) -> None:
    _require(length <= MAX_LENGTH, f"a text or list of {length:,}", f"{MAX_LENGTH:,}")


def _require(holds: bool, found: str, limit: str) -> None:
    if not holds:
        raise TemplateLimitError(
            f"the template makes {found}; the limit is {limit}. Use a template that needs less."
        )
