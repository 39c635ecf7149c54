"""Laws of numbers with check digits and of access keys: what has the form and a right check digit
is found, whatever else looks like it stays.
"""

import random
import string
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from llmsys.config.cleaning import PiiReplacementConfig
from llmsys.data_pipeline.text.access_keys import find_access_keys
from llmsys.data_pipeline.text.checked_numbers import (
    find_cards,
    find_ibans,
    find_national_ids,
    has_luhn_digit,
    is_iban,
)
from llmsys.data_pipeline.text.pii_replacement import replace_pii

CHECKED = ("iban", "card", "national_id", "secret")
Find = Callable[[str], Iterator[tuple[int, int]]]


def list_found(find: Find, text: str) -> list[str]:
    return [text[begin:end] for begin, end in find(text)]


def replace(text: str, **options: object) -> str:
    config = PiiReplacementConfig.model_validate({"kinds": CHECKED, **options})
    return str(replace_pii(pa.array([text], pa.large_string()), [""], config)[0][0].as_py())


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("IBAN: DE89 3704 0044 0532 0130 00.", ["DE89 3704 0044 0532 0130 00"]),
        ("(GB82WEST12345698765432)", ["GB82WEST12345698765432"]),
        ("账号NO9386011117947谢谢", ["NO9386011117947"]),
        (
            "FR1420041010050500013M02606 MT84MALT011000012345MTLCAST001S",
            ["FR1420041010050500013M02606", "MT84MALT011000012345MTLCAST001S"],
        ),
        ("NL91 ABNA 0417 1643 00 AND MORE", ["NL91 ABNA 0417 1643 00"]),
        ("DE88 3704 0044 0532 0130 00", []),  # a wrong check digit
        ("DE89 370 40044 0532 0130 00", []),  # other groups
        ("DE89370400440532013000X xDE89370400440532013000 DE8937040044053201300", []),
        ("XX89370400440532013000", []),  # no country
        ("SE45 IS BIGGER THAN NO12 OR DE34", []),
    ],
)
def test_ibans_have_the_length_of_their_country_and_right_digits(
    text: str, numbers: list[str]
) -> None:
    assert list_found(find_ibans, text) == numbers
    assert ("XX00" in replace(text)) == bool(numbers)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("card 4111 1111 1111 1111, 12/27", ["4111 1111 1111 1111"]),
        ("4111-1111-1111-1111 12/27 123", ["4111-1111-1111-1111"]),
        ("4111 1111 1111 1111 12/27", ["4111 1111 1111 1111"]),
        ("4111 1111 1111 1111 123", ["4111 1111 1111 1111"]),
        ("卡号5555555555554444。", ["5555555555554444"]),
        ("3782 822463 10005 or 378282246310005", ["3782 822463 10005", "378282246310005"]),
        ("30569309025904 2223003122003222", ["30569309025904", "2223003122003222"]),
        ("6011111111111117 3530111333300000", ["6011111111111117", "3530111333300000"]),
        ("4111 1111 1111 1112", []),  # a wrong check digit
        ("4111 1111-1111 1111", []),  # two separators
        ("4111 1111 1111 1111 1111; 1234 4111 1111 1111 1111", []),  # longer numbers
        ("0.4111111111111111, 4111111111111111.5, a4111111111111111", []),
        ("1234 5678 9012 3452", []),  # right digit, no issuer
        ("4006381333931 9780306406157 978-0-306-40615-7", []),  # EAN and ISBN
        ("order 4929-0011-22, 2024-05-01 12:30:45, v5.4.3.2.1", []),
        ("4242 4242 4242", []),
        ("0000000000000000 4444444444444444", []),
        ("sha1 4111111111111111c0ffee 356938035643809", []),  # a hash; an IMEI
        ("1714556645123456 5105105105105", []),  # microseconds; thirteen digits
    ],
)
def test_cards_have_the_form_of_a_scheme_and_luhns_digit(text: str, numbers: list[str]) -> None:
    assert list_found(find_cards, text) == numbers
    assert ("0000 00" in replace(text)) == bool(numbers)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("身份证11010519491231002X，", ["11010519491231002X"]),
        ("RSSMRA85T10A562S e MRTMTT91D08F205J", ["RSSMRA85T10A562S", "MRTMTT91D08F205J"]),
        ("CPF 529.982.247-25", ["529.982.247-25"]),
        ("1 84 12 76 451 089 46", ["1 84 12 76 451 089 46"]),
        ("NIR 184127645108946.", ["184127645108946"]),
        ("110105194912310021 110105194913310020", []),
        ("RSSMRA85T10A562T RSSMRA85T10A562", []),
        ("529.982.247-26 111.111.111-11 1.529.982.247-25 52998224725", []),
        ("1 84 12 76 451 089 47 1841276451089461 0.184127645108946", []),
    ],
)
def test_national_ids_have_their_form_and_check_digits(text: str, numbers: list[str]) -> None:
    assert list_found(find_national_ids, text) == numbers
    assert (replace(text) != text) == bool(numbers)


def test_a_department_of_corsica_counts_as_a_number() -> None:
    for letters, digits in (("2A", "19"), ("2B", "18")):
        check = 97 - int(f"18412{digits}451089") % 97
        number = f"18412{letters}451089{check:02d}"
        assert list_found(find_national_ids, f"no {number}") == [number]
        assert number not in replace(f"no {number}")


def test_access_keys_are_found_by_their_beginning_and_private_keys_whole() -> None:
    letters = (string.ascii_letters + string.digits) * 2
    found = [
        "AKIAIOSFODNN7EXAMPLE",
        f"ghp_{letters[:36]}",
        f"AIza{letters[:35]}",
        f"sk_live_{letters[:24]}",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----x-----END PRIVATE KEY-----",
    ]
    assert list_found(find_access_keys, "; ".join(found)) == found
    for text in (
        "AKIAIOSFODNN7EXAMPL", "XAKIAIOSFODNN7EXAMPLE", f"ghp_{letters[:37]}", "sk_live_short",
        "-----BEGIN PUBLIC KEY-----x-----END PUBLIC KEY-----", "-----BEGIN PRIVATE KEY----- no end",
        "hf_hub_download(repo_id)", "hf_AbstractModelForSequenceClassification_",
    ):  # fmt: skip
        assert not list_found(find_access_keys, text), text
    assert replace(found[-2]).startswith("EXAMPLE-SECRET-")


def test_check_digits_are_those_of_the_definitions() -> None:
    choose = random.Random(0)
    for _ in range(2_000):
        digits = "".join(choose.choices(string.digits, k=choose.randint(2, 19)))
        total = 0
        for place, digit in enumerate(reversed(digits)):
            value = int(digit) * (2 if place % 2 else 1)
            total += value - 9 if value > 9 else value
        assert has_luhn_digit(digits) == (total % 10 == 0)
        body = "".join(choose.choices(string.digits + string.ascii_uppercase, k=16)) + "00000000"
        moved = "".join(str("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(c)) for c in f"{body}DE00")
        right = 98 - int(moved) % 97
        assert is_iban(f"DE{right:02d}{body}")
        assert not is_iban(f"DE{(right + 1) % 97:02d}{body}")


def test_random_numbers_are_seldom_taken_for_personal_data() -> None:
    """By arithmetic: one of ten digits is Luhn's, and a fifth of the prefixes a scheme's."""
    choose = random.Random(1)
    numbers = ["".join(choose.choices(string.digits, k=16)) for _ in range(5_000)]
    assert len(list_found(find_cards, " x ".join(numbers))) < 5_000 * 0.04
    codes = ["".join(choose.choices(string.ascii_uppercase + string.digits, k=22)) for _ in numbers]
    assert len(list_found(find_ibans, " x ".join(codes))) < 3
    hashes = [f"{choose.getrandbits(160):040x}" for _ in numbers]
    text = "\n".join([*hashes, *(one.upper() for one in hashes)])
    for find in (find_cards, find_ibans, find_national_ids, find_access_keys):
        assert not list_found(find, text)


def test_a_replacement_belongs_to_nobody_and_is_not_found_again() -> None:
    text = "DE89370400440532013000 4111111111111111 529.982.247-25 AKIAIOSFODNN7EXAMPLE"
    assert replace(text, replacement="token") == "<IBAN> <CARD> <NATIONAL_ID> <SECRET>"
    clean = replace(text)
    assert clean != replace(text, seed=1)
    assert replace(clean, seed=2) == clean
    _, counts = replace_pii(
        pa.array([text, "nothing 4111", text], pa.large_string()),
        ["", "", ""],
        PiiReplacementConfig(kinds=("card",)),
    )
    assert {kind: count.tolist() for kind, count in counts.items()} == {"card": [1, 0, 1]}


def test_time_is_linear_in_the_text() -> None:
    hostile = [
        "DE89 " * 20_000, "4111 " * 20_000, "4" * 100_000, "-----BEGIN PRIVATE KEY-----" * 4_000,
        "AAAAAA00" * 12_000, "1 84 12 76 451 089 " * 5_000, "529.982." * 12_000,
    ]  # fmt: skip
    begun = time.process_time()
    for text in hostile:  # what grows with the square of 100,000 characters takes minutes
        for find in (find_cards, find_ibans, find_national_ids, find_access_keys):
            list(find(text))
    assert time.process_time() - begun < 30
