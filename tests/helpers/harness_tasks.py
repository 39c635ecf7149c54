"""Tasks of lm-evaluation-harness over local files: choices with and without a context, a text,
and a greedy answer.
"""

import json
import random
from pathlib import Path

import yaml

HEAD = {"dataset_path": "json", "test_split": "test", "num_fewshot": 0}
TASKS = {
    "toy_choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "toy_arc": {
        "output_type": "multiple_choice", "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}", "num_fewshot": 2, "fewshot_split": "test",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "toy_text": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity",
            "bits_per_byte")],
    },
    "toy_answer": {
        "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 6, "do_sample": False,
            "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def write_harness_tasks(folder: Path, words: list[str], count: int = 12) -> tuple[str, ...]:
    """Write the task files and their data; the names of the tasks."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        choices = [
            " " + " ".join(draw.choices(words, k=draw.randint(1, 4)))
            for _ in range(draw.randint(2, 4))
        ]
        question = " ".join(draw.choices(words, k=5)) + (" " if number % 3 == 0 else "")
        text = " ".join(draw.choices(words, k=20 + 10 * number))
        rows.append({"question": question, "choices": choices, "answer": number % 2, "text": text})
    (folder / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"dataset_kwargs": {"data_files": {"test": str(folder / "toy.jsonl")}}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(HEAD | {"task": name} | files | task))
    return tuple(TASKS)
