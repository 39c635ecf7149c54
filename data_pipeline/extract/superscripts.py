"""Write superscripts and subscripts as `x^2` and `x_2` where they are mathematics.

What a superscript means is decided by its content and by the characters before it:

- It follows a letter, digit or closing bracket directly, and holds no link and no link holds it
  alone: those are references to notes.
- A number is an exponent after a number that is no year, after a bracket without words, after one
  or two letters (`m`, `km`) and after the names of `_LONG_BASES`. After a word it is the number of
  a note; so is a 1 after anything but a number, and a number after a name such as `Li`.
- A number with a sign before it is an exponent (`s^{-1}`); one with a sign after it, or a sign
  alone, is a charge after up to three letters (`Ca^{2+}`).
- A letter is an exponent after a single letter, a number or a bracket, unless it ends an ordinal or
  an abbreviation (`2e`, `No`, `5η`). Several letters do that too (`1st`, `Mme`), unless some are
  Latin and some Greek (`e^{iπ}`).
- Up to `_LONGEST_SUPERSCRIPT` letters, digits, operators and brackets are an exponent if they hold
  a digit or an operator.

A subscript of up to `_LONGEST_SUBSCRIPT` letters, digits and operators is always one. In
`1<sup>1</sup>/<sub>2</sub>` the number and its fraction are divided by a space.

The compiled core has the same rules in `native/superscripts.h`.

Invariants:
- Only the last `_WINDOW` characters before a superscript are read, so that time is linear.
"""

import re
from typing import Final, NamedTuple

_WINDOW: Final = 40
_LONGEST_SUPERSCRIPT: Final = 24
_LONGEST_SUBSCRIPT: Final = 12
_YEARS = ("1", "2")  # first digits of numbers of four digits that are taken for years
_LONG_BASES: Final = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "exp",
        "det",
        "mol",
        "bar",
        "rad",
        "kpc",
        "Mpc",
    ]
)
# after a number or a capital letter these end ordinals and abbreviations: 2e, 1o, 3d, Me, St
_ABBREVIATING: Final = "adehorst"
# without the Greek and Cyrillic letters that Unicode added to these blocks, and signs among them
_LETTER = "A-Za-z\u0391-\u03a9\u03b1-\u03c9\u0410-\u044f\u0401\u0451µ"
_CAPITAL = re.compile("[A-Z\u0391-\u03a9\u0410-\u042f\u0401]")
_SIGN = "+\\-−–"
_BASE_WORD = re.compile(f"[{_LETTER}]+\\Z")
_BASE_NUMBER = re.compile(r"[0-9]+\Z")
_WORD = re.compile(f"[{_LETTER}]{{3}}")
_FRACTION = re.compile(r"[0-9]\^(?:[0-9]|\{[0-9]+\})[/⁄]\Z")

_NUMBER = re.compile(r"[0-9]{1,4}|[0-9]{1,3}[./][0-9]{1,3}")
_SIGNED = re.compile(f"[{_SIGN}][0-9]{{1,4}}")
_CHARGE = re.compile(f"[0-9]{{0,3}}[{_SIGN}]")
_VARIABLE = re.compile("[A-Za-z\u0391-\u03a9\u03b1-\u03c9]")
_GREEK = re.compile("[\u0391-\u03a9\u03b1-\u03c9]")
_LATIN = re.compile("[A-Za-z]")
_EXPRESSION = re.compile(f"[{_LETTER}0-9{_SIGN}=/*().^_{{}}∞ ]+")
_OPERATOR = re.compile(f"[0-9{_SIGN}=/^_]")
_IN_BRACKETS = re.compile(r"\([^()]*\)")
_SUBSCRIPT = re.compile(f"[{_LETTER}0-9{_SIGN}=/*(),.^_{{}}∞]+")
_NAMED = re.compile(f"[{_LETTER}0-9∞]")
_OPENING = {")": "(", "]": "[", "}": "{"}


class _Base(NamedTuple):
    """The text before a superscript: digits, letters, or a closing bracket."""

    number: str = ""
    word: str = ""
    bracket: str = ""


def write_superscript(run: list[str], start: int, end_tag: str) -> bool:
    """Mark the end of a run of text as a superscript or subscript if it is mathematics.

    Args:
        run: Pieces of the run, none of them empty; changed in place.
        start: Pieces before the superscript.
        end_tag: `/sup` or `/sub`.

    Returns:
        Whether pieces before `start` changed, so that other places in the run do not hold.
    """
    is_superscript = end_tag == "/sup"
    limit = _LONGEST_SUPERSCRIPT if is_superscript else _LONGEST_SUBSCRIPT
    # White space around it does not count, but few pages have much of it.
    if start == 0 or not 0 < sum(map(len, run[start : start + _WINDOW])) <= _WINDOW:
        return False
    if len(run) - start > _WINDOW:
        return False
    content = "".join(run[start:])
    script = content.strip()
    if not 0 < len(script) <= limit:
        return False
    first, before = _read_window(run, start)
    window = before[-_WINDOW:]
    if not is_superscript and _FRACTION.search(window) and _BASE_NUMBER.fullmatch(script):
        caret = before.rindex("^")
        whole = before[:caret] + " " + before[caret + 1 :].replace("{", "").replace("}", "")
        run[first:start] = [whole]
        return True
    base = _find_base(window)
    is_mathematics = _is_exponent(script, base) if is_superscript else _is_subscript(script, base)
    if base is None or not is_mathematics:
        return False
    mark = "^" if is_superscript else "_"
    # the minus of typographers
    written = script.replace("−", "-").replace("–", "-")
    written = written if len(written) == 1 else f"{{{written}}}"
    run[start:] = [mark + written + content[len(content.rstrip()) :]]
    return False


def _read_window(run: list[str], start: int) -> tuple[int, str]:
    """Return the last pieces before a superscript with at least `_WINDOW` characters: the index of
    the first, and their text.
    """
    first = start
    size = 0
    while first and size < _WINDOW:
        first -= 1
        size += len(run[first])
    return first, "".join(run[first:start])


def _find_base(window: str) -> _Base | None:
    """Return what a superscript follows, or None where it follows nothing that has exponents."""
    last = window[-1:]
    if found := _BASE_NUMBER.search(window):
        return _Base(number=found[0])
    if found := _BASE_WORD.search(window):
        return _Base(word=found[0])
    if last in _OPENING:
        opening = window.rfind(_OPENING[last])
        # `V_{max}`, but not `(as he says)`
        is_script = last == "}" and window[max(opening - 1, 0)] in "^_"
        if opening >= 0 and (is_script or not _WORD.search(window, opening)):
            return _Base(bracket=last)
    return None


def _is_exponent(script: str, base: _Base | None) -> bool:
    """Return whether a superscript is mathematics."""
    if base is None:
        return False
    letters = len(base.word)
    is_name = letters == 2 and _is_capitalized(base.word)
    if _NUMBER.fullmatch(script):
        if base.number:
            return not (len(base.number) == 4 and base.number.startswith(_YEARS))
        is_short = bool(base.bracket) or (letters in (1, 2) and not is_name)
        return script != "1" and (is_short or base.word in _LONG_BASES)
    if _SIGNED.fullmatch(script):
        return True
    if _CHARGE.fullmatch(script):
        return letters <= 3
    is_atom = not letters or letters == 1
    if _VARIABLE.fullmatch(script):
        ends_word = bool(base.number) or (letters == 1 and bool(_CAPITAL.match(base.word)))
        is_greek = bool(base.number) and bool(_GREEK.match(script))
        is_ending = script == "o" or is_greek or (ends_word and script in _ABBREVIATING)
        return is_atom and not is_ending
    if not is_atom or not _EXPRESSION.fullmatch(script):
        return False
    if script.count("(") != script.count(")") or _WORD.search(script):
        return False
    # `f^{(n)}`, but not the note `25(1)`
    if _IN_BRACKETS.fullmatch(script):
        return letters == 1
    is_product = _LATIN.search(script) and _GREEK.search(script)
    return bool(_OPERATOR.search(script) or is_product)


def _is_capitalized(word: str) -> bool:
    return bool(_CAPITAL.match(word)) and not _CAPITAL.match(word, 1)


def _is_subscript(script: str, base: _Base | None) -> bool:
    """Return whether a subscript is mathematics or chemistry."""
    is_short = _SUBSCRIPT.fullmatch(script) and _NAMED.search(script)
    return base is not None and bool(is_short)
