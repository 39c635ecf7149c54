"""Many words as one regular expression that follows them letter by letter.

Reads words, gives a pattern. Words with a common beginning share it, so that a position of a text costs as many steps
as the longest word that begins there, however many words there are: the time is linear in the text.
"""

import re
from collections.abc import Iterable
from typing import Any

_END = ""  # marks where a word ends; no character is the empty string


def build_alternation(words: Iterable[str]) -> str:
    """Return the source of a pattern that matches each of the words and nothing else, longer ones first."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[_END] = {}
    return _build_tree_pattern(root)


def _build_tree_pattern(root: dict[str, Any]) -> str:
    """Write a tree of letters as a pattern; without recursion, so that words may be long."""
    done: dict[int, str] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        open_nodes = [child for child in node.values() if child and id(child) not in done]
        if open_nodes:
            stack += open_nodes
            continue
        stack.pop()
        done[id(node)] = _build_node_pattern(node, done)
    return done[id(root)]


def _build_node_pattern(node: dict[str, Any], done: dict[int, str]) -> str:
    branches = [re.escape(letter) + done.get(id(child), "") for letter, child in node.items() if letter != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"
