"""Run `llmsys completion`: print a script that completes verbs, options, configs and keys in a
shell.

The script holds every word, so that the Tab key starts no Python. Print it again after an update of
llmsys.
"""

import argparse
import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args, get_origin

from llmsys.launch.commands.verbs import VERBS

if TYPE_CHECKING:
    from pydantic import BaseModel

SHELLS = ("bash", "zsh", "fish")


class CompletionWords(NamedTuple):
    """Words by verb: options, fixed choices of positional arguments, its own keys; configs and
    keys of all verbs.
    """

    options: Mapping[str, list[str]]
    choices: Mapping[str, list[str]]
    own: Mapping[str, list[str]]
    configs: list[str]
    keys: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell."""
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")
    parser.epilog = (
        "bash: llmsys completion bash > ~/.local/share/bash-completion/completions/llmsys\n"
        "zsh:  llmsys completion zsh > FOLDER/_llmsys, a folder of $fpath\n"
        f"fish: llmsys completion fish > ~/.config/fish/completions/llmsys.fish\n\n{parser.epilog}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the script; with --json, its words."""
    words = collect_words(arguments.build_parser)
    scripts = {"bash": format_bash, "zsh": format_zsh, "fish": format_fish}
    print(json.dumps(words._asdict()) if arguments.json else scripts[arguments.shell](words))
    return 0


def collect_words(build_parser: Callable[[str], argparse.ArgumentParser]) -> CompletionWords:
    """Return the words of every verb, shipped config and key of a run config."""
    from llmsys.config.loading.config_files import list_config_names
    from llmsys.config.run import RunConfig

    options: dict[str, list[str]] = {}
    choices: dict[str, list[str]] = {}
    own: dict[str, list[str]] = {}
    for name in VERBS:
        # argparse has no public list of its arguments
        actions = build_parser(name)._actions
        options[name] = sorted(
            word for action in actions for word in action.option_strings if word.startswith("--")
        )
        choices[name] = [
            str(word)
            for action in actions
            if not action.option_strings
            for word in action.choices or ()
        ]
        module = importlib.import_module(f"llmsys.launch.commands.{name}")
        own[name] = [f"{key}=" for key in getattr(module, "OWN_NAMES", ())]
    return CompletionWords(
        options, choices, own, list_config_names(), sorted(set(_iter_keys([RunConfig], "")))
    )


def _iter_keys(sections: "Iterable[type[BaseModel]]", path: str) -> Iterator[str]:
    """Yield `section.key=` of every value, and `section.key=value` of every value that is one of
    a few words.
    """
    from llmsys.config.section import list_section_types

    for section in sections:
        for name, field in section.model_fields.items():
            key, below = f"{path}{name}", list_section_types(field.annotation)
            if not below or get_origin(field.annotation) in (tuple, list, dict):
                yield f"{key}="
                words = (
                    get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
                )
                yield from (f"{key}={word}" for word in words)
            else:
                yield from _iter_keys(below, f"{key}.")


def format_bash(words: CompletionWords) -> str:
    """Return the script for bash 4.4 and newer."""
    cases = "\n".join(
        f"    {name}) options='{' '.join(words.options[name])}'; "
        f"choices='{' '.join(words.choices[name])}'; own='{' '.join(words.own[name])}';;"
        for name in VERBS
    )
    takers = "|".join(name for name, verb in VERBS.items() if verb.takes_config)
    return f"""\
# Completion of llmsys for bash, from: llmsys completion bash
_llmsys() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} verb=${{COMP_WORDS[1]}}
  local options='' choices='' own='' prefix='' IFS=$' \\t\\n'
  # bash splits words at =, so that key=value is three of them
  if [[ $cur == '=' ]]; then prefix="${{COMP_WORDS[COMP_CWORD-1]}}="; cur=''
  elif [[ ${{COMP_WORDS[COMP_CWORD-1]}} == '=' ]]; then prefix="${{COMP_WORDS[COMP_CWORD-2]}}="
  fi
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W '{" ".join(VERBS)}' -- "$cur")); return
  fi
  case $verb in
{cases}
    *) return;;
  esac
  if [[ -z $prefix && $cur == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$cur")); return; fi
  if [[ -z $prefix && -n $choices && $COMP_CWORD == 2 ]]; then
    COMPREPLY=($(compgen -W "$choices" -- "$cur")); return
  fi
  case $verb in
    {takers})
      if (( COMP_CWORD == 2 )); then
        COMPREPLY=($(compgen -W '{" ".join(words.configs)}' -- "$cur") $(compgen -f -- "$cur"))
        return
      fi
      COMPREPLY=($(compgen -W "$own {" ".join(words.keys)}" -- "$prefix$cur"))
      [[ -n $prefix ]] && COMPREPLY=("${{COMPREPLY[@]#"$prefix"}}")
      [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
      (( ${{#COMPREPLY[@]}} )) || COMPREPLY=($(compgen -f -- "$cur"))
      ;;
    *) COMPREPLY=($(compgen -f -- "$cur"));;
  esac
}}
complete -o filenames -F _llmsys llmsys"""


def format_zsh(words: CompletionWords) -> str:
    """Return the script for zsh; a file `_llmsys` in a folder of $fpath."""
    verbs = "\n".join(f"    '{name}:{_quote(verb.summary)}'" for name, verb in VERBS.items())
    cases = "\n".join(
        f"    {name}) options=({' '.join(words.options[name])}); "
        f"choices=({' '.join(words.choices[name])}); own=({' '.join(words.own[name])});;"
        for name in VERBS
    )
    takers = "|".join(name for name, verb in VERBS.items() if verb.takes_config)
    return f"""\
#compdef llmsys
# Completion of llmsys for zsh, from: llmsys completion zsh
_llmsys() {{
  local -a verbs options choices own
  verbs=(
{verbs}
  )
  if (( CURRENT == 2 )); then _describe verb verbs; return; fi
  case ${{words[2]}} in
{cases}
    *) return 1;;
  esac
  if [[ ${{words[CURRENT]}} == -* ]]; then compadd -- $options; return; fi
  if (( CURRENT == 3 && $#choices )); then compadd -- $choices; return; fi
  case ${{words[2]}} in
    {takers})
      if (( CURRENT == 3 )); then compadd -- {" ".join(words.configs)}; _files; return; fi
      compadd -S '' -- $own {" ".join(words.keys)}
      ;;
    *) _files;;
  esac
}}
if [[ $funcstack[1] == _llmsys ]]; then _llmsys "$@"; else compdef _llmsys llmsys; fi"""


def format_fish(words: CompletionWords) -> str:
    """Return the script for fish."""
    lines = ["# Completion of llmsys for fish, from: llmsys completion fish"]
    for name, verb in VERBS.items():
        lines.append(
            f"complete -c llmsys -f -n __fish_use_subcommand -a {name} -d '{_quote(verb.summary)}'"
        )
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c llmsys {seen} -l {option.removeprefix('--')}"
            for option in words.options[name]
        ]
        if several := [*words.choices[name], *words.own[name]]:
            lines.append(f"complete -c llmsys {seen} -a '{' '.join(several)}'")
    takers = " ".join(name for name, verb in VERBS.items() if verb.takes_config)
    shared = f"complete -c llmsys -n '__fish_seen_subcommand_from {takers}'"
    lines += [f"{shared} -a '{' '.join(several)}'" for several in (words.configs, words.keys)]
    return "\n".join(lines)


def _quote(text: str) -> str:
    """Return text for single quotes of a shell, and without the colon that separates
    descriptions in zsh.
    """
    return text.replace("'", "").replace(":", ",")
