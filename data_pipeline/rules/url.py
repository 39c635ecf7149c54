"""Reject pages by URL, with the entry of the list that matched.

The tests and their order are datatrove's: registered domain, host, whole URL, hard words, soft
words, substrings. Differences: hosts are compared in lower case, and blank lines of word lists are
not entries. Registered domains follow the public suffix list bundled with tldextract; nothing is
fetched.
"""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from llmsys.config.cleaning import UrlFilterConfig
from llmsys.config.custom_rules import EntryListConfig
from llmsys.data_pipeline.rules.entry_lists import EntrySet, build_alternation, read_entries

TESTS = ("domain", "subdomain", "url", "hard word", "soft words", "substring")
_SYMBOLS = re.compile(r"[^a-zA-Z0-9]+")
_CACHED_HOSTS = 1 << 16


class UrlRejection(NamedTuple):
    """The reason for rejecting a URL: the test, the match, and for counts the value and the
    threshold.
    """

    test: str
    match: str
    value: float | None = None
    threshold: float | None = None

    @property
    def reason(self) -> str:
        """One line such as `url: hard word (casino)`."""
        if self.value is None:
            return f"url: {self.test} ({self.match})"
        return f"url: {self.test} {self.value:g} > {self.threshold:g} ({self.match})"


class UrlFilter:
    """The lists of one config, loaded once."""

    def __init__(self, config: UrlFilterConfig) -> None:
        self._hosts = EntrySet(config.hosts, lower=True)
        self._urls = EntrySet(config.urls)
        self._allowed_hosts = EntrySet(config.allow_list, lower=True)
        self._allowed_urls = EntrySet(config.allow_list)
        self._hard = _read_words(config.hard_words)
        self._soft = _read_words(config.soft_words)
        self._max_soft_words = config.max_soft_words
        substrings = _read_words(config.substrings)
        self._substring = re.compile(build_alternation(sorted(substrings))) if substrings else None

    def apply(self, urls: Sequence[str]) -> list[UrlRejection | None]:
        """Judge URLs.

        Args:
            urls: The URLs as the crawl gives them.

        Returns:
            The rejection of each URL; None for an accepted one. An entry of the allow list wins
            over every other list and word.
        """
        names = [parse_host_names(url) for url in urls]
        domains = [name[0] for name in names]
        hosts = [name[1] for name in names]
        listed = list(
            zip(self._hosts.contains(domains), self._hosts.contains(hosts),
                self._urls.contains(urls), strict=True)
        )  # fmt: skip
        allowed = [
            self._allowed_hosts.contains(domains),
            self._allowed_hosts.contains(hosts),
            self._allowed_urls.contains(urls),
        ]
        return [
            None if any(free) else self._find_rejection(url, matches, name)
            for url, matches, name, free in zip(
                urls, listed, names, zip(*allowed, strict=True), strict=True
            )
        ]

    def _find_rejection(
        self, url: str, listed: tuple[bool, bool, bool], names: tuple[str, str]
    ) -> UrlRejection | None:
        for test, hit, match in zip(TESTS, listed, (*names, url), strict=False):
            if hit:
                return UrlRejection(test, match)
        return self._find_word_rejection(url) or self._find_substring_rejection(url)

    def _find_word_rejection(self, url: str) -> UrlRejection | None:
        if not self._hard and not self._soft:
            return None
        words = list(dict.fromkeys(_SYMBOLS.split(url)))
        hard = next((word for word in words if word in self._hard), None)
        if hard is not None:
            return UrlRejection("hard word", hard)
        soft = [word for word in words if word in self._soft]
        if len(soft) > self._max_soft_words:
            return UrlRejection(
                "soft words", ", ".join(soft), float(len(soft)), float(self._max_soft_words)
            )
        return None

    def _find_substring_rejection(self, url: str) -> UrlRejection | None:
        found = self._substring.search(_strip_symbols(url)) if self._substring else None
        return UrlRejection("substring", found[0]) if found else None


@lru_cache(maxsize=1)
def load_url_filter(config: UrlFilterConfig, digests: tuple[str, ...]) -> UrlFilter:
    """Load the URL lists, once per process.

    Args:
        config: the lists and limits.
        digests: digests of the list files, so that changed files are loaded again.

    Returns:
        The filter.

    Raises:
        DataError: if a list cannot be read.
    """
    return UrlFilter(config)


def parse_host_names(url: str) -> tuple[str, str]:
    """Parse the names of a URL.

    Args:
        url: The URL.

    Returns:
        The registered domain and the host; "" where it has none (an IP address, localhost).
    """
    parts = url.split("/", 3)
    # Only scheme and host are looked up, so that pages of one host share a cache entry.
    whole = len(parts) > 3 and not parts[1] and parts[0].endswith(":")
    return _extract_host_names("/".join(parts[:3]) if whole else url)


@lru_cache(maxsize=_CACHED_HOSTS)
def _extract_host_names(url: str) -> tuple[str, str]:
    found = _load_suffix_extractor()(url)
    return found.top_domain_under_public_suffix.lower(), found.fqdn.lower()


@lru_cache(maxsize=1)
def _load_suffix_extractor():  # type: ignore[no-untyped-def]  # its type would import tldextract, which takes 0.1 s
    import tldextract

    # No cache folder and no URLs: the bundled list, and no request.
    return tldextract.TLDExtract(cache_dir=None, suffix_list_urls=())


def _strip_symbols(text: str) -> str:
    return _SYMBOLS.sub("", text).lower()


def _read_words(listed: EntryListConfig) -> frozenset[str]:
    return frozenset(_drop_empty_words(_strip_symbols(entry) for entry in read_entries(listed)))


def _drop_empty_words(words: Iterable[str]) -> Iterable[str]:
    return (word for word in words if word)
