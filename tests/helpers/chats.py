"""Small chat templates of the kinds that published models have, with and without `{% generation
%}`, and chats.
"""

import json
import random
from pathlib import Path
from typing import Any

CHATML = (
    "{% for m in messages %}\n{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }}{{ '<|im_end|>\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if tools is not none %}{{ tools | tojson }}{% endif %}{% for m in messages "
    "%}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}{% if m['role'] == "
    "'assistant' %}{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% else %}{{ m['content'] | trim + "
    "'<|eot_id|>' }}{% endif %}{% endfor %}{%- if add_generation_prompt %}{{ "
    "'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
GEMMA = (
    "{% set ns = namespace(first='') %}{% if messages[0]['role'] == 'system' %}{% set ns.first = "
    "messages[0]['content'] + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}{%- for m in "
    "messages -%}{{ '<start_of_turn>' + (m['role'] | replace('assistant', 'model')) + '\\n' }}{% "
    "if m['role'] == 'assistant' %}{{ m['content'] }}{{ '<end_of_turn>\\n' }}{% else %}{{ "
    "(ns.first if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{%- "
    "endfor -%}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] }}{{ eos_token "
    "}}{% elif m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}{% "
    "else %}{{ '<<SYS>>' + m['content'] + '<</SYS>>' }}{% endif %}{% endfor %}"
)
PLAIN_TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "llama2": LLAMA2}
ANSWERS = "{% if m['role'] == 'assistant' %}"


def mark_answers(source: str) -> str:
    """The template with its assistant's branch in `{% generation %}`."""
    before, _, after = source.partition(ANSWERS)
    answer, _, rest = after.partition("{% el")
    return f"{before}{ANSWERS}{{% generation %}}{answer}{{% endgeneration %}}{{% el{rest}"


MARKED_TEMPLATES = {name: mark_answers(source) for name, source in PLAIN_TEMPLATES.items()}


def build_chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of sums: a question, an answer, sometimes a system message and a second turn."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        one, other = draw.randrange(10), draw.randrange(10)
        chat = [{"role": "user", "content": f"What is {one} plus {other}?"}]
        chat.append({"role": "assistant", "content": f"It is {one + other}."})
        if number % 3 == 0:
            chat.insert(0, {"role": "system", "content": "You add numbers."})
        if number % 4 == 0:
            chat += [
                {"role": "user", "content": "Thanks"},
                {"role": "assistant", "content": "You are welcome."},
            ]
        rows.append({"messages": chat})
    return rows


def write_chats(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path
