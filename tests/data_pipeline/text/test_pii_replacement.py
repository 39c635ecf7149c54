"""Laws of personal data: found as plain expressions find them, in linear time, replaced by what
follows.
"""

import ipaddress
import random
import time

import pyarrow as pa
import pytest

from llmsys.config.cleaning import PiiReplacementConfig
from llmsys.data_pipeline.text.pii_replacement import (
    find_emails,
    find_ips,
    find_phones,
    is_public,
    replace_pii,
)
from tests.reference.filters import scan_emails


def replaced(text: str, identity: str = "", **options: object) -> str:
    config = PiiReplacementConfig.model_validate({"kinds": ("email", "ip", "phone"), **options})
    return str(replace_pii(pa.array([text], pa.large_string()), [identity], config)[0][0].as_py())


def test_emails_are_those_of_the_plain_expression() -> None:
    choose = random.Random(0)
    for _ in range(6_000):
        text = "".join(choose.choices("ab.@!-_é 1'", k=choose.randint(3, 22)))
        assert list(find_emails(text)) == scan_emails(text), repr(text)


def test_public_addresses_are_pythons_but_for_the_networks_that_its_releases_see_differently() -> (
    None
):
    choose = random.Random(1)
    for _ in range(5_000):
        address = ipaddress.ip_address(choose.getrandbits(32))
        assert is_public(str(address)) == address.is_global, address
    texts = {
        "8.8.8.8": 1,
        "10.0.0.1": 0,
        "192.0.0.9": 1,
        "192.0.0.1": 0,
        "1.02.3.4": 0,
        "256.1.1.1": 1,
        "1.2.3.4.5": 1,
    }
    assert {text: len(list(find_ips(text))) for text in texts} == texts


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("Схема: иван.петров@почта.рф, и ещё.", ["иван.петров@почта.рф"]),
        ("Schreib an jörg.müller@bücher.example!", ["jörg.müller@bücher.example"]),
        ("josé@españa.es; ΝΊΚΟΣ@παράδειγμα.ελ", ["josé@españa.es", "ΝΊΚΟΣ@παράδειγμα.ελ"]),
        ("संपर्क@डेटामेल.भारत", ["संपर्क@डेटामेल.भारत"]),
        ("请联系joe@mail.com谢谢", ["joe@mail.com"]),
        ("邮箱：用户@例子.中国。", ["用户@例子.中国"]),
        ("e\u0301ric@mail.fr", ["e\u0301ric@mail.fr"]),
        ("«é@b.cd» é@ @é.fr", ["é@b.cd"]),
    ],
)
def test_addresses_with_letters_of_any_script_are_found_whole(
    text: str, addresses: list[str]
) -> None:
    assert [text[begin:end] for begin, end in find_emails(text)] == addresses


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("at 2a00:1450:4001:81b::200e.", ["2a00:1450:4001:81b::200e"]),
        (
            "http://[2606:4700:4700::1111]:443/ and 2001:4860:4860::8888/128",
            ["2606:4700:4700::1111", "2001:4860:4860::8888"],
        ),
        ("2600::, 2620:FE:0:0:0:0:0:9%eth0: the server", ["2600::", "2620:FE:0:0:0:0:0:9"]),
        ("64:ff9b::8.8.8.8 or ::ffff:8.8.4.4", ["64:ff9b::8.8.8.8", "8.8.4.4"]),
        ("9.9.9.9, 2a00::1, 1.1.1.1", ["9.9.9.9", "2a00::1", "1.1.1.1"]),
        ("fe80::1 ::1 fd00::7 2001:db8::1 3fff::1 ff02::1", []),
        ("2024:05:01 12:30:45 00:1a:2b:3c:4d:5e std::vector 2023:a 2a00:::1 2a00::1::2", []),
        ("x2a00::1 2a00::1x 2a00:1:2:3:4:5:6:7:8", []),
    ],
)
def test_public_ipv6_addresses_are_found_and_replaced(text: str, addresses: list[str]) -> None:
    found = list(find_ips(text))
    assert [text[begin:end] for begin, end in found] == addresses
    clean = replaced(text)
    assert not any(address in clean.split() for address in addresses)
    assert clean.count("2001:db8::") == text.count("2001:db8::") + sum(
        ":" in address for address in addresses
    )
    assert list(find_ips(clean)) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("call +49 30 901820 now", "+49 30 901820"),
        ("+1 (212) 555-0123", "+1 (212) 555-0123"),
        ("(212) 555-0123.", "(212) 555-0123"),
        ("tel:212.555.0123", "212.555.0123"),
        ("1-212-555-0123", "1-212-555-0123"),
        ("+44 (0)20 7946 0958", "+44 (0)20 7946 0958"),
        ("2024-05-01 12:30", None),
        ("ISBN 978-3-16-148410-0", None),
        ("1234 5678 9012 3456", None),
        ("3.14159265358979", None),
        ("+1234567", None),
        ("x+4930901820", None),
    ],
)
def test_phone_numbers_look_like_phone_numbers(text: str, number: str | None) -> None:
    found = [text[begin:end] for begin, end in find_phones(text)]
    assert found == ([number] if number else [])


def test_a_replacement_follows_from_the_match_and_the_seed_alone() -> None:
    one, other = "Write to joe@mail.com, eve@mail.com.", "So eve@mail.com wrote to joe@mail.com."
    first, second = replaced(one), replaced(other)
    names = [text[begin:end] for text in (first, second) for begin, end in find_emails(text)]
    assert names[0] == names[3]
    assert names[1] == names[2]
    many = {replaced(f"mail {n}.{n}.{n}.7 now", seed=seed) for n in range(1, 9) for seed in (0, 1)}
    assert len(many) == 16
    assert all(
        "mail 192.0.2." in text or "mail 198.51.100." in text or "mail 203.0.113." in text
        for text in many
    )
    assert (
        len({replaced("ask +49 30 901820", str(n), consistency="document") for n in range(40)}) > 20
    )
    assert (
        replaced("+49 30 901820, joe@mail.com, 8.8.4.4", replacement="token")
        == "<PHONE>, <EMAIL>, <IP>"
    )


def test_matches_are_counted_by_kind_and_document_and_nothing_else_changes() -> None:
    texts = ["a@b.cd and e@f.gh at 9.9.9.9", "nobody, v1.2.3, 10.1.1.1", "@ @ @", ""]
    column, counts = replace_pii(
        pa.array(texts, pa.large_string()), [""] * 4, PiiReplacementConfig()
    )
    assert {kind: count.tolist() for kind, count in counts.items()} == {
        "email": [2, 0, 0, 0],
        "ip": [1, 0, 0, 0],
    }
    assert column.to_pylist()[1:] == texts[1:]
    again, _ = replace_pii(column, [""] * 4, PiiReplacementConfig(kinds=("ip",)))
    assert again.equals(column)  # documentation networks are not public


HOSTILE = [
    "a!" * 50_000,
    "x@" + "a-" * 50_000,
    "a." * 50_000 + "@",
    "..a" * 30_000 + "@b.c",
    "1." * 50_000,
    "+1 2" * 25_000,
]


def test_time_is_linear_in_the_text() -> None:
    begun = time.process_time()
    for text in HOSTILE:  # what grows with the square of 100,000 characters takes minutes
        for find in (find_emails, find_ips, find_phones):
            list(find(text))
    assert time.process_time() - begun < 30
