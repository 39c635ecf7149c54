"""A hostile chat template ends in an error before it takes the machine's time or memory."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsys.errors import DataError
from llmsys.vocabulary.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a"}]
GIB = 2**30


@pytest.fixture(autouse=True)
def limited_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + GIB, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}aaaaaaaaa{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set s = namespace(t='a') %}{% for a in range(99)%}{%set s.t = s.t ~ s.t %}{% endfor %}",
        "{% set s = namespace(t='a') %}{% for a in range(99)%}{%set s.t = s.t + s.t %}{% endfor %}",
        "{% set s = namespace(t=[1]) %}{% for a in range(99)%}{%set s.t = s.t + s.t %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ ([1] * 10 ** 12) | length }}",
        "{{ 9 ** 99999 }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 99999999999) }}",
        "{{ 'a'.ljust(10 ** 12) }}",
        "{{ 'a' | center(10 ** 12) }}",
        "{{ 'a\\nb' | indent(10 ** 12) }}",
        "{{ ('a' * 9999999).replace('a', 'a' * 9999999) }}",
        "{{ ('a' * 9999999) | replace('a', 'a' * 9999999) }}",
        "{{ (['a' * 9999999] * 99999) | join }}",
        "{{ ''.join(['a' * 9999999] * 99999) }}",
        "{% set t = 'a' * 9999999 %}{% for a in range(99999) %}{{ t }}{% endfor %}",
        "{% set t = 'a' * 9999999 %}{% for a in range(99999) %}{% set u = t.upper() %}{% endfor %}",
        "{{ 'a' }}" + " " * 2**18,
    ],
)
def test_work_length_and_source_are_limited(source: str) -> None:
    with pytest.raises(DataError, match="the limit is"):
        ChatTemplate(source).render_prompt(MESSAGES)


def test_each_rendering_has_the_whole_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmsys.vocabulary.template_limits.MAX_WORK", 500)
    template = ChatTemplate("{% for a in range(300) %}a{% endfor %}")
    for _ in range(3):
        assert template.render_prompt(MESSAGES) == "a" * 300


def test_long_chats_are_within_the_limits() -> None:
    """A thousand messages of a thousand characters, joined one by one as some templates do."""
    template = ChatTemplate(
        "{% set s = namespace(t='') %}{% for m in messages %}"
        "{% set s.t = s.t ~ m.role | upper ~ m.content.replace('a', 'b') | trim ~ loop.index %}"
        "{% endfor %}{{ s.t }}"
    )
    messages = [{"role": "user", "content": "a" * 1000}] * 1000
    expected = "".join(f"USER{'b' * 1000}{number}" for number in range(1, 1001))
    assert template.render_prompt(messages) == expected
