"""Run `llmsys prepare CONFIG --compare-dialects A,B`: compare two readings of the same published
rules.
"""

import json
from typing import TYPE_CHECKING, Any

from llmsys.errors import ConfigError

if TYPE_CHECKING:
    from llmsys.config.run import RunConfig

MOST_REASONS = 8


def run_compare_dialects(config: "RunConfig", dialects: str, as_json: bool) -> int:
    """Apply the rules to the config's documents in each dialect and print the differences."""
    from llmsys.data_pipeline.inspection.dialect_differences import compare_dialects

    if config.data.kind != "crawl":
        raise ConfigError(
            f"data.kind={config.data.kind} has no rules to compare. Use a config with "
            "data.kind=crawl."
        )
    differences = compare_dialects(config.data, [name for name in dialects.split(",") if name])
    if as_json:
        print(json.dumps([_to_dict(difference) for difference in differences]))
    else:
        print("\n\n".join(_format_difference(difference) for difference in differences))
    return 0


def _format_difference(difference: Any) -> str:
    """Return one rule: a matrix of verdicts, why they differ, and examples with value and
    threshold of each dialect.
    """
    first, second = difference.dialects
    share = difference.num_differing / difference.num_documents if difference.num_documents else 0.0
    width = max(len(f"{name} drops") for name in difference.dialects) + 2
    rows = [
        f"{difference.rule}: {first} and {second} differ on {difference.num_differing:,} of "
        f"{difference.num_documents:,} "
        f"documents ({share:.1%})",
        f"  {'':{width}}{f'{second} keeps':>{width}}{f'{second} drops':>{width}}",
    ]
    for kept, word in ((True, "keeps"), (False, "drops")):
        counts = "".join(f"{difference.verdicts[kept, other]:>{width},}" for other in (True, False))
        rows.append(f"  {f'{first} {word}':{width}}{counts}")
    for tests, count in _select_largest(difference):
        rows.append(f"  {count:,} × {first}: {tests[0]} | {second}: {tests[1]}")
        for example in difference.examples[tests][:1]:
            rows.append(f"      {example.url or example.id}")
            rows += [
                f"        {name}: {sentence}"
                for name, sentence in zip(difference.dialects, example.sentences, strict=True)
            ]
    return "\n".join(rows)


def _select_largest(difference: Any) -> list[tuple[tuple[str, str], int]]:
    """Return the pairs of tests on which most documents differ."""
    found: list[tuple[tuple[str, str], int]] = sorted(
        difference.tests.items(), key=lambda one: (-one[1], one[0])
    )
    return found[:MOST_REASONS]


def _to_dict(difference: Any) -> dict[str, Any]:
    """Return a difference as a JSON object."""
    first, second = difference.dialects
    words = {True: "keeps", False: "drops"}
    return {
        "rule": difference.rule,
        "dialects": [first, second],
        "documents": difference.num_documents,
        "differing": difference.num_differing,
        "verdicts": {
            f"{first} {words[one]}, {second} {words[other]}": difference.verdicts[one, other]
            for one in words
            for other in words
        },
        "tests": [
            {
                first: tests[0],
                second: tests[1],
                "documents": count,
                "examples": [
                    {
                        "id": example.id,
                        "url": example.url,
                        first: example.sentences[0],
                        second: example.sentences[1],
                    }
                    for example in difference.examples[tests]
                ],
            }
            for tests, count in sorted(difference.tests.items(), key=lambda one: (-one[1], one[0]))
        ],
    }
