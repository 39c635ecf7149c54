"""Run `llmsys generate`: continue prompts with the newest checkpoint of a run."""

import argparse
import json
import os
import sys

from llmsys.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --prompt, which may be repeated. Without it the config's generation.prompts are
    continued.
    """
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to continue; may be repeated (default: generation.prompts)",
    )
    parser.add_argument(
        "--no-stream",
        action="store_true",
        help="print texts when they are complete, not token by token",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print each prompt with its continuation; with --json, a list of {prompt, text}.

    A single prompt on a terminal is streamed. Several are generated together and printed at the
    end.
    """
    from llmsys.config.loading.load import load_run_config
    from llmsys.config.loading.trusted_run import require_trusted_run
    from llmsys.launch.process.run_requirements import require_checkpoint

    config = load_run_config(arguments.config, arguments.overrides)
    require_trusted_run(config, "text")
    if arguments.prompt:
        generation = config.generation.model_copy(update={"prompts": tuple(arguments.prompt)})
        config = config.model_copy(update={"generation": generation})
    if not config.generation.prompts:
        raise ConfigError(
            "There are no prompts. Give --prompt TEXT, or set generation.prompts in the config."
        )
    require_checkpoint(config)
    from llmsys.generate.chat_format import is_answered_as_chat
    from llmsys.generate.prompt_completion import complete_prompts
    from llmsys.train.build_trainer import set_num_threads
    from llmsys.train.run_data import load_run_tokenizer
    from llmsys.train.trained_model import load_trained_model

    set_num_threads(config)
    model, _ = load_trained_model(config)
    stream = (
        sys.stdout.isatty()
        and len(config.generation.prompts) == 1
        and config.generation.num_beams == 1
    )
    if stream and not (arguments.json or arguments.no_stream):
        _print_piece(
            _highlight_prompt(config.generation.prompts[0]) + "\n" * is_answered_as_chat(config)
        )
        complete_prompts(
            model, load_run_tokenizer(config), config, lambda _, piece: _print_piece(piece)
        )
        _print_piece("\n")
        return 0
    separator = "\n" if is_answered_as_chat(config) else ""
    samples = complete_prompts(model, load_run_tokenizer(config), config)
    if arguments.json:
        print(json.dumps(samples, ensure_ascii=False))
    for sample in [] if arguments.json else samples:
        print(f"{_highlight_prompt(sample['prompt'])}{separator}{sample['text']}\n")
    return 0


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)


def _highlight_prompt(prompt: str) -> str:
    from llmsys.log import can_show_escapes

    return (
        f"\033[1m{prompt}\033[0m"
        if can_show_escapes(sys.stdout) and not os.environ.get("NO_COLOR")
        else prompt
    )
