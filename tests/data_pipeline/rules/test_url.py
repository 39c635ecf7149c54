"""Laws of URL lists: datatrove's tests in its order, exact membership however long the list,
nothing fetched.
"""

import gzip
import mmap
import random
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmsys.config.cleaning import UrlFilterConfig
from llmsys.config.custom_rules import EntryListConfig
from llmsys.data_pipeline.rules import entry_lists, entry_table
from llmsys.data_pipeline.rules.entry_lists import EntrySet, read_entries
from llmsys.data_pipeline.rules.entry_table import EntryTable
from llmsys.data_pipeline.rules.url import UrlFilter, parse_host_names
from llmsys.errors import DataError
from tests.reference.filters import find_url_match


def listed(*entries: str) -> EntryListConfig:
    return EntryListConfig(entries=entries)


RULES = UrlFilterConfig(
    hosts=listed("evil.org", "Sub.Good.edu", "bücher.de"),
    urls=listed("http://good.edu/one/page?x=1"),
    hard_words=listed("viagra", "x-rated"),
    soft_words=listed("casino", "poker", "free"),
    substrings=listed("sexting", "fuck-off"),
    allow_list=listed("fine.evil.org", "http://evil.org/fine", "allowed.net"),
)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://www.evil.org/page", "url: domain (evil.org)"),
        ("https://WWW.EVIL.ORG:8080/", "url: domain (evil.org)"),
        ("http://user:word@a.b.evil.org", "url: domain (evil.org)"),
        ("http://sub.good.edu/", "url: subdomain (sub.good.edu)"),
        ("http://www.bücher.de/", "url: domain (bücher.de)"),
        ("http://good.edu/one/page?x=1", "url: url (http://good.edu/one/page?x=1)"),
        ("http://good.edu/buy-viagra-now", "url: hard word (viagra)"),
        ("http://good.edu/Viagra", None),  # as in datatrove, words keep their case
        ("http://good.edu/xrated", "url: hard word (xrated)"),
        ("http://good.edu/casino", None),
        ("http://good.edu/casino/casino", None),
        ("http://good.edu/casino/free-poker", "url: soft words 3 > 1 (casino, free, poker)"),
        ("http://good.edu/SEX/ting", "url: substring (sexting)"),
        ("http://good.edu/f/u/c/k/o-ff", "url: substring (fuckoff)"),
        ("http://fine.evil.org/viagra", None),
        ("http://evil.org/fine", None),
        ("http://www.allowed.net/viagra", None),
        ("http://notevil.org/", None),
        ("http://127.0.0.1/", None),
        ("", None),
    ],
)
def test_the_first_test_that_fails_names_what_matched(url: str, reason: str | None) -> None:
    refusal = UrlFilter(RULES).apply([url])[0]
    assert (refusal.reason if refusal else None) == reason


def test_tests_on_words_equal_their_plain_twin() -> None:
    choose = random.Random(0)
    parts = [
        "casino",
        "poker",
        "free",
        "viagra",
        "xrated",
        "sex",
        "ting",
        "Casino",
        "a",
        "9",
        "-",
        "/",
        "_",
        ".",
        "%20",
    ]
    urls = [
        "http://good.net/" + "".join(choose.choices(parts, k=choose.randrange(1, 9)))
        for _ in range(3_000)
    ]
    found = [refusal.test if refusal else None for refusal in UrlFilter(RULES).apply(urls)]
    twin = (("viagra", "xrated"), ("casino", "poker", "free"), 1, ("sexting", "fuckoff"))
    assert found == [find_url_match(url, *twin) for url in urls]
    assert set(found) == {None, "hard word", "soft words", "substring"}


def test_registered_domains_follow_the_public_suffix_list_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "socket", None)
    assert parse_host_names("http://a.b.example.co.uk/x") == ("example.co.uk", "a.b.example.co.uk")
    assert parse_host_names("http://a.city.kawasaki.jp/") == (
        "city.kawasaki.jp",
        "a.city.kawasaki.jp",
    )
    assert parse_host_names("http://me.github.io?/") == ("github.io", "me.github.io")
    assert parse_host_names("http://localhost/") == ("", "")


def test_long_lists_hold_what_they_hold_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_lists, "_BLOCK_BYTES", 1_000)
    path = tmp_path / "hosts.txt.gz"
    path.write_bytes(
        gzip.compress(
            "\n".join(["# a comment", "", *(f" Host{n}.org \r" for n in range(9_000))]).encode()
        )
    )
    hosts = EntrySet(EntryListConfig(files=(path,), entries=("own.org", "own.org")), lower=True)
    assert len(hosts) == 9_001
    assert hosts.contains(["host0.org", "HOST8999.org", "own.org", "host9000.org", "",
        "# a comment", "host"]) == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip
    assert read_entries(EntryListConfig(files=(path,)))[0] == "Host0.org"


def test_entries_that_share_a_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda data: len(data))
    words = EntrySet(listed("aa", "bb", "c"))
    assert words.contains(["aa", "bb", "cc", "c", "d"]) == [True, True, False, True, False]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(entry_table, "LEAST_CACHED_BYTES", 1)
    return tmp_path / "cache" / "entry_lists"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("colliding", [False, True])
def test_a_mapped_list_decides_as_a_set_does(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, seed: int, colliding: bool
) -> None:
    if colliding:
        monkeypatch.setattr("xxhash.xxh3_64_intdigest", lambda data: zlib.crc32(data) % 97)
    choose = random.Random(seed)

    def make() -> str:
        return "".join(choose.choices("aBcDé.-", k=choose.randint(1, 5)))

    path = tmp_path / "hosts.txt"
    path.write_text("\n".join(entries := [make() for _ in range(2_000)]))
    asked = [make() for _ in range(2_000)] + entries[:100] + [""]
    own = EntryListConfig(files=(path,), entries=("own.org",))
    for lower in (False, True):
        fold = [entry.encode().lower() if lower else entry.encode() for entry in entries]
        plain = [
            (text.encode().lower() if lower else text.encode()) in {*fold, b"own.org"}
            for text in asked
        ]
        for _ in range(2):  # built and mapped
            found = EntrySet(own, lower=lower)
            assert found.contains(asked) == plain
            assert found.contains(["own.org"]) == [True]
    assert len([file for file in cache.iterdir() if not file.suffix]) == 2
    path.write_text("other")
    assert EntrySet(own).contains(["other", *entries[:5]]) == [True] + [False] * 5


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "version", "foreign"])
def test_a_damaged_table_is_built_again_and_said(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("\n".join(f"host{number}.org" for number in range(1_000)))
    own = EntryListConfig(files=(path,))
    EntrySet(own)
    (table,) = (file for file in cache.iterdir() if not file.suffix)
    whole = table.read_bytes()
    changed = {
        "flip": whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:],
        "cut": whole[:-1],
        "empty": b"",
        "version": whole[:16] + bytes([whole[16] + 1]) + whole[17:],
        "foreign": bytes(len(whole)),
    }
    table.write_bytes(changed[damage])
    caplog.set_level("WARNING")
    assert EntrySet(own).contains(["host7.org", "host1000.org"]) == [True, False]
    assert f"{table} is damaged: it is built again from its list" in caplog.text
    assert table.read_bytes() == whole


def test_processes_that_start_together_build_a_table_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("\n".join(f"host{number}.org" for number in range(1_000)))
    own = EntryListConfig(files=(path,))
    built = []

    def load(_: int) -> list[bool]:
        def build() -> EntryTable:
            built.append(1)
            return entry_lists._build_table(own, True)

        table = entry_table.load_entry_table(own, build, lower=True)
        return [len(table.hashes) == 1_000, isinstance(table.blob, mmap.mmap)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(load, range(8))) == [[True, True]] * 8
    assert len(built) == 1


def test_without_a_cache_folder_a_list_is_built(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    path = tmp_path / "hosts.txt"
    path.write_text("host.org")
    assert EntrySet(EntryListConfig(files=(path,))).contains(["host.org"]) == [True]


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(b"evil.org\n" * 100)[:-12])
    for name in (path, tmp_path / "absent.txt"):
        with pytest.raises(
            DataError, match=rf"list {name} cannot be read: .*\. Give an existing, complete file\."
        ):
            EntrySet(EntryListConfig(files=(name,)))
