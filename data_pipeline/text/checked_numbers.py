"""Find bank accounts, payment cards and national ids by their form and their check digits.

Sources: ISO 13616 (IBAN) with the lengths of SWIFT's registry; ISO/IEC 7812 (card numbers, Luhn's
check digit) with the prefixes of the large schemes; GB 11643 (resident ids of China), the Italian
codice fiscale (decree of 23 December 1976), the Brazilian CPF, the French NIR.

Invariants:
- A number counts only where its length, its groups and its check digits are right, and where it is
  not a part of a longer row of digits, so that order numbers, ISBNs, hashes and versions stay.
- Only ASCII letters and digits touch a number: in Chinese text there is no space before it.
- Spans are sorted and do not overlap. Time is linear: every pattern has a bounded length.
"""

import re
from collections.abc import Iterator

Span = tuple[int, int]

# Characters of an IBAN by country, of SWIFT's registry.
_IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22,
    "BR": 29, "BY": 28, "CH": 21, "CR": 22, "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28,
    "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22, "GI": 23,
    "GL": 18, "GR": 27, "GT": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26,
    "IT": 27, "JO": 30, "KW": 30, "KZ": 20, "LB": 28, "LC": 32, "LI": 21, "LT": 20, "LU": 20,
    "LV": 21, "LY": 25, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30,
    "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29, "RO": 24, "RS": 22,
    "SA": 24, "SC": 31, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "ST": 25, "SV": 28, "TL": 23,
    "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
}  # fmt: skip
_IBAN_START = re.compile(r"(?<![A-Za-z0-9_])([A-Z]{2})[0-9]{2}(?= ?[A-Z0-9]{4})")
_MIN_IBAN_DIGITS = 8  # every country has more; words in capitals have none

# As it is printed on a card: without separators, or with one kind of them between the groups.
_CARD = re.compile(
    r"(?<![A-Za-z0-9_])(?<![0-9][.,/-])"
    r"(?:[0-9]{14,19}"
    r"|(?<![0-9] )[0-9]{4}(?P<four>[ -])[0-9]{4}(?P=four)[0-9]{4}(?P=four)[0-9]{4}"
    r"(?:(?P=four)[0-9]{1,3})?"
    r"|(?<![0-9] )3[0-9]{3}(?P<six>[ -])[0-9]{6}(?P=six)[0-9]{4,5})"
    # a date after it does not make it longer: 4000 0000 0000 0002 12/27
    r"(?![A-Za-z0-9_]|[.,-][0-9]| [0-9]{4}(?![0-9/]))"
)
# Prefixes and lengths. Visa's old numbers of 13 digits are left out: they look like EAN codes.
_SCHEMES = re.compile(
    r"4[0-9]{15}(?:[0-9]{3})?"  # Visa
    r"|(?:5[1-5]|222[1-9]|22[3-9]|2[3-6]|27[01]|2720)[0-9]*"  # Mastercard, 16 digits
    r"|3[47][0-9]{13}"  # American Express
    r"|3(?:0[0-5]|[689])[0-9]*"  # Diners Club, 14 digits
    r"|(?:6011|64[4-9]|65|62|35(?:2[89]|[3-8]))[0-9]*"  # Discover, UnionPay, JCB
)
_FOUR_GROUPS = len("0000 0000 0000 0000")
_MASTERCARD_DIGITS = 16
_DINERS_DIGITS = 14
_MIN_OTHER_DIGITS = 16

_RESIDENT_ID = re.compile(
    r"(?<![A-Za-z0-9_.])[1-6][0-9]{5}(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])"
    r"[0-9]{3}[0-9X](?![A-Za-z0-9_]|\.[0-9])"
)
_RESIDENT_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)
_FISCAL_CODE = re.compile(
    r"(?<![A-Za-z0-9_])[A-Z]{6}[0-9L-NP-V]{2}[ABCDEHLMPRST][0-9L-NP-V]{2}[A-Z][0-9L-NP-V]{3}[A-Z]"
    r"(?![A-Za-z0-9_])"
)
# Value of a character at an odd place, counted from 1: of 0 to 9, which are those of A to J too,
# then of K to Z.
_ODD_VALUES = (1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18, 20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25,
    24, 23)  # fmt: skip
_CPF = re.compile(r"(?<![A-Za-z0-9_.-])[0-9]{3}\.[0-9]{3}\.[0-9]{3}-[0-9]{2}(?![A-Za-z0-9_-])")
# Sex, year, month (20 and above: unknown), department (2A and 2B: Corsica), commune, order, check.
_NIR = re.compile(
    r"(?<![A-Za-z0-9_])(?<![0-9][ .,/-])[12](?P<gap> ?)[0-9]{2}(?P=gap)(?:0[1-9]|1[0-2]|[2-9][0-9])"
    r"(?P=gap)(?:[0-9]{2}|2[AB])(?P=gap)[0-9]{3}(?P=gap)[0-9]{3}(?P=gap)[0-9]{2}"
    r"(?![A-Za-z0-9_]|[ .,-]?[0-9])"
)


def find_ibans(text: str) -> Iterator[Span]:
    """Find international bank account numbers, without spaces or in groups of four.

    Args:
        text: The text.

    Yields:
        Their spans, in characters.
    """
    end = 0
    for found in _IBAN_START.finditer(text):
        length = _IBAN_LENGTHS.get(found[1])
        if length is None or found.start() < end:
            continue
        for size in (length, length + (length - 1) // 4):
            stop = found.start() + size
            written = text[found.start() : stop]
            groups = written.split(" ")
            is_grouped = all(len(group) == 4 for group in groups[:-1]) and len(groups[-1]) <= 4
            compact = "".join(groups)
            if (
                len(compact) == length
                and (len(groups) == 1 or is_grouped)
                and not _is_word(text[stop : stop + 1])
                and is_iban(compact)
            ):
                end = stop
                yield found.start(), stop
                break


def is_iban(number: str) -> bool:
    """Return whether the check digits of an IBAN are right (ISO 7064, MOD 97-10).

    Args:
        number: Country, check digits and account, without spaces.

    Returns:
        True if they are.
    """
    if not (number.isascii() and number.isalnum() and number.upper() == number):
        return False
    if sum(map(str.isdigit, number)) < _MIN_IBAN_DIGITS:
        return False
    return int("".join(str(int(one, 36)) for one in number[4:] + number[:4])) % 97 == 1


def find_cards(text: str) -> Iterator[Span]:
    """Find numbers of payment cards: of a large scheme, with Luhn's check digit.

    Args:
        text: The text.

    Yields:
        Their spans, in characters.
    """
    for found in _CARD.finditer(text):
        # The group after four groups may be a date or a security code.
        for written in (found[0], found[0][:_FOUR_GROUPS] if found["four"] else ""):
            digits = written.replace(" ", "").replace("-", "")
            if _has_card_scheme(digits) and has_luhn_digit(digits) and len(set(digits)) > 1:
                yield found.start(), found.start() + len(written)
                break


def _has_card_scheme(digits: str) -> bool:
    if not _SCHEMES.fullmatch(digits):
        return False
    match digits[0]:
        case "5" | "2":
            return len(digits) == _MASTERCARD_DIGITS
        case "3" if digits[1] in "0689":
            return len(digits) == _DINERS_DIGITS
        case "3" if digits[1] in "47":
            return True  # the pattern has its length
        case _:
            return len(digits) >= _MIN_OTHER_DIGITS


def has_luhn_digit(digits: str) -> bool:
    """Return whether the last digit is the check digit of the others (ISO/IEC 7812-1, annex B).

    Args:
        digits: Digits alone.

    Returns:
        True if it is.
    """
    doubled = [2 * int(digit) for digit in digits[-2::-2]]
    return sum(map(int, digits[-1::-2]), sum(n // 10 + n % 10 for n in doubled)) % 10 == 0


def find_national_ids(text: str) -> Iterator[Span]:
    """Find national ids whose form and check digits are strong enough: of China, Italy, France, and
    of Brazil with its dots.

    Args:
        text: The text.

    Yields:
        Their spans, in characters.
    """
    spans = [
        found.span()
        for pattern, is_valid in (
            (_RESIDENT_ID, _is_resident_id),
            (_FISCAL_CODE, _is_fiscal_code),
            (_CPF, _is_cpf),
            (_NIR, _is_nir),
        )
        for found in pattern.finditer(text)
        if is_valid(found[0])
    ]
    end = 0
    for begin, stop in sorted(spans):
        if begin >= end:
            end = stop
            yield begin, stop


def _is_resident_id(number: str) -> bool:
    total = sum(weight * int(one) for weight, one in zip(_RESIDENT_WEIGHTS, number, strict=False))
    return "10X98765432"[total % 11] == number[-1]


def _is_fiscal_code(code: str) -> bool:
    values = [int(one) if one.isdigit() else ord(one) - ord("A") for one in code[:-1]]
    total = sum(_ODD_VALUES[value] for value in values[::2]) + sum(values[1::2])
    return total % 26 == ord(code[-1]) - ord("A")


def _is_cpf(number: str) -> bool:
    digits = [int(one) for one in number if one.isdigit()]
    if len(set(digits)) == 1:
        return False
    for length in (9, 10):
        total = sum(digit * (length + 1 - place) for place, digit in enumerate(digits[:length]))
        if digits[length] != total * 10 % 11 % 10:
            return False
    return True


def _is_nir(number: str) -> bool:
    compact = number.replace(" ", "")
    # Corsica: 2A counts as 19, 2B as 18.
    body = compact[:-2].replace("2A", "19").replace("2B", "18")
    return int(compact[-2:]) == 97 - int(body) % 97


def _is_word(character: str) -> bool:
    return character.isascii() and (character.isalnum() or character == "_")
