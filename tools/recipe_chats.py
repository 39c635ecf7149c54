"""Write the chats of recipes/chat: questions whose answers a program knows, so anybody may have
them.

    python tools/recipe_chats.py [FOLDER]

Sums, differences, comparisons, neighbours of numbers and words to repeat, in chats of one to three
questions. Writes `train.jsonl` and `heldout.jsonl` (chats), `chat.jinja` (their template), and
`questions.jsonl` (held-out questions with four choices, for `evaluation.tasks`).

Invariants:
- The same files on every machine. A question is in one of the two splits.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TRAIN_CHATS, HELDOUT_CHATS, QUESTIONS = 2_000, 200, 200
# One of so many questions is held out.
HELDOUT_PART = 8
WORDS = [
    "kernel", "package", "server", "window", "branch", "commit", "index", "table", "query",
    "column", "cursor",
    "string", "module", "method", "class", "object", "folder", "driver", "system", "socket",
    "thread", "process",
    "signal", "memory", "buffer", "editor", "screen", "printer", "mirror", "archive", "patch",
]  # fmt: skip
SYSTEM = "Answer in one sentence."
TEMPLATE = """\
{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}
{% generation %}{{ ' ' + m['content'] + eos_token }}{% endgeneration %}\
{% else %}{{ ' ' + m['content'] + '\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}
"""


class Exchange(NamedTuple):
    """A question, its answer, and three wrong answers."""

    question: str
    answer: str
    wrong: tuple[str, ...]

    @property
    def is_heldout(self) -> bool:
        """True where the question is in the held-out split."""
        return (
            hashlib.blake2b(self.question.encode(), digest_size=4).digest()[0] % HELDOUT_PART == 0
        )


def draw_exchange(draw: random.Random) -> Exchange:
    """Return a question of one of five kinds."""
    one, other = draw.randrange(1, 30), draw.randrange(1, 30)
    low, high = sorted((one, other + 30 if one == other else other))
    match draw.randrange(5):
        case 0:
            return _ask_number(f"What is {one} plus {other}?", "It is {}.", one + other)
        case 1:
            return _ask_number(f"What is {high} minus {low}?", "It is {}.", high - low)
        case 2:
            first, second = draw.sample((low, high), 2)
            wrong = (f"{low} is larger.", f"{high + 1} is larger.", f"{high + 10} is larger.")
            return Exchange(f"Which is larger, {first} or {second}?", f"{high} is larger.", wrong)
        case 3:
            return _ask_number(
                f"Which number comes after {one * 3}?", f"After {one * 3} comes {{}}.", one * 3 + 1
            )
        case _:
            said, *others = draw.sample(WORDS, 5)
            pair = f"{said} {others[0]}"
            others = [f"You said {said} {word}." for word in others[1:]]
            return Exchange(f"Repeat after me: {pair}", f"You said {pair}.", tuple(others))


def _ask_number(question: str, answer: str, number: int) -> Exchange:
    wrong = tuple(answer.format(number + change) for change in (1, 2, 10))
    return Exchange(question, answer.format(number), wrong)


def iter_chats(count: int, seed: int, *, is_heldout: bool) -> Iterator[dict[str, Any]]:
    """Yield rows with `messages` whose questions are all of one split."""
    draw = random.Random(seed)
    for number in range(count):
        messages = [{"role": "system", "content": SYSTEM}] if number % 4 == 0 else []
        for exchange in draw_exchanges(draw, 1 + number % 3, is_heldout=is_heldout):
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        yield {"messages": messages}


def draw_exchanges(draw: random.Random, count: int, *, is_heldout: bool) -> list[Exchange]:
    """Return questions of one split."""
    found: list[Exchange] = []
    while len(found) < count:
        if (exchange := draw_exchange(draw)).is_heldout == is_heldout:
            found.append(exchange)
    return found


def iter_questions(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield held-out questions with four choices, each once: as the template renders them, and
    as they were asked.
    """
    draw, asked = random.Random(seed), set[str]()
    while len(asked) < count:
        [exchange] = draw_exchanges(draw, 1, is_heldout=True)
        if exchange.question not in asked:
            asked.add(exchange.question)
            choices = draw.sample((exchange.answer, *exchange.wrong), 4)
            rendered = f"user: {exchange.question}\nassistant:"
            yield {"question": rendered, "choices": choices,
                "answer": choices.index(exchange.answer),
                   "message": exchange.question}  # fmt: skip


def build_files() -> dict[str, str]:
    """Return the text of every file by its name."""
    rows = {
        "train.jsonl": iter_chats(TRAIN_CHATS, 0, is_heldout=False),
        "heldout.jsonl": iter_chats(HELDOUT_CHATS, 1, is_heldout=True),
        "questions.jsonl": iter_questions(QUESTIONS, 2),
    }
    lines = {
        name: "".join(json.dumps(row) + "\n" for row in chosen) for name, chosen in rows.items()
    }
    return lines | {"chat.jinja": TEMPLATE}


def write_chats(folder: Path) -> None:
    """Write every file into a folder, which is made if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in build_files().items():
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path("runs", "recipes", "chats")
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        default=default,
        help="default: %(default)s",
    )
    write_chats(parser.parse_args().folder)


if __name__ == "__main__":
    main()
