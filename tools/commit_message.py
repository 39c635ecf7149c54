"""Check a commit message: `python tools/commit_message.py FILE`, the `commit-msg` hook of
.pre-commit-config.yaml.

A subject of at most 72 characters is whole in `git log --oneline` and in mails; the body says why
the change was made, which the diff cannot.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

MAX_SUBJECT_CHARACTERS = 72
# Subjects that git writes itself, or that are folded into another commit.
OWN_SUBJECTS = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
# git cuts the message here, in `git commit --verbose`.
SCISSORS = "# ------------------------ >8 ------------------------"


def find_message_violations(message: str) -> Iterator[str]:
    """Yield what a commit message lacks.

    Args:
        message: Text of the file that git gives to the hook, with its comments.

    Yields:
        Sentences for its author.
    """
    kept = message.partition(SCISSORS)[0]
    subject, *rest = [line for line in kept.splitlines() if not line.startswith("#")] or [""]
    if subject.startswith(OWN_SUBJECTS):
        return
    if not subject.strip():
        yield "The first line is empty. Begin with a subject in the imperative."
    if len(subject) > MAX_SUBJECT_CHARACTERS:
        yield (
            f"The subject has {len(subject)} characters, more than {MAX_SUBJECT_CHARACTERS}. Move "
            "the details into the body."
        )
    if subject.endswith("."):
        yield "The subject ends in a full stop. Remove it."
    if rest and rest[0].strip():
        yield "The second line is not empty. Separate subject and body by an empty line."
    if not any(line.strip() for line in rest):
        yield "There is no body. Say why the change is made; the diff says what."


def main() -> int:
    """Check the message of the named file; return the exit status."""
    if len(sys.argv) != 2:
        print("usage: python tools/commit_message.py FILE", file=sys.stderr)
        return 2
    found = list(find_message_violations(Path(sys.argv[1]).read_text(encoding="utf-8")))
    for sentence in found:
        print(f"commit message: {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
