"""The `llmsys` command: `llmsys VERB CONFIG [section.key=value …]`, one grammar for every verb.

Reads the command line. Imports only the module that the verb names, so that `llmsys --help` is
fast.

With --json an error is one object on stdout: {"error": {"kind", "message", "status"}}, where kind
is the class of the error. The message for people is on stderr as without it.

Exit status: 2 after an error that the user can fix, with one message; 75 after a SIGTERM that a
preparation handled; 130 after Ctrl-C. `train` and `launch` end with the statuses of
launch/train.py.
"""

import argparse
import importlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from llmsys import __version__
from llmsys.errors import (
    ConfigError,
    LlmsysError,
    UntrustedCodeError,
    to_data_error,
    to_missing_package_error,
)
from llmsys.launch.commands.verbs import (
    CONFIG_HELP,
    OVERRIDE_HELP,
    TRUST_HELP,
    VERBS,
    VerbParser,
    suggest_verb,
)

# the last two are 128 + SIGINT and 128 + SIGPIPE, as a shell reports them
MENDABLE, STOPPED, INTERRUPTED, OUTPUT_CLOSED = 2, 75, 130, 141

# Verbs that keep what is done, and verbs that Ctrl-C ends as planned.
RESUMED = {"prepare", "tokenizer", "train", "launch", "ablate"}
UNENDING = {"chat", "watch"}


def main(
    arguments: Sequence[str] | None = None, before_verb: Callable[[str], None] = lambda verb: None
) -> int:
    """Run one verb and return the exit status.

    Args:
        arguments: the words after `llmsys`; default: those of this process.
        before_verb: called with the name of the verb once its arguments are parsed.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[0:1] == ["help"] and words[1:2] and words[1] in VERBS:
        words = [words[1], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(format_help(), end="")
        return 0 if words else MENDABLE
    if words[0] in ("-V", "--version"):
        print(f"llmsys {__version__}")
        return 0
    as_json = "--json" in words
    if words[0] not in VERBS:
        unknown = f"{words[0]!r} is not a verb.{_suggest_command(words[0])} See: llmsys --help"
        return _print_error(ConfigError(unknown), as_json=as_json)
    try:
        return _run_command(words[0], words[1:], before_verb)
    except UntrustedCodeError as error:
        command = shlex.join(["llmsys", *words, "--trust-code"])
        told = UntrustedCodeError(f"{error}\nTo consent: {command}")
        return _print_error(told, as_json=as_json)
    except LlmsysError as error:
        return _print_error(error, as_json=as_json)
    except SystemExit as ended:  # ranks that failed have printed why
        if as_json and isinstance(ended.code, int) and ended.code:
            _print_json_error("LaunchError", "ranks failed; stderr has their messages", ended.code)
        raise
    except KeyboardInterrupt as interrupt:
        is_request = signal.SIGTERM in interrupt.args
        if words[0] not in UNENDING:
            follow = (
                "What is done is kept; the same command continues"
                if words[0] in RESUMED
                else "Start it again with"
            )
            cause = "stopped" if is_request else "interrupted"
            print(f"llmsys: {cause}. {follow}: {shlex.join(['llmsys', *words])}", file=sys.stderr)
        return STOPPED if is_request else INTERRUPTED
    except BrokenPipeError:  # `llmsys show … | head`
        # or the interpreter's own flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except OSError as error:
        if (problem := to_data_error(error)) is None:
            raise
        return _print_error(problem, as_json=as_json)
    except ModuleNotFoundError as error:
        if (missing := to_missing_package_error(error)) is None:
            raise
        return _print_error(missing, as_json=as_json)


def format_help() -> str:
    """Return the text of `llmsys --help`."""
    verbs = "\n".join(f"  {name:<10} {verb.summary}" for name, verb in VERBS.items())
    return (
        "usage: llmsys VERB CONFIG [section.key=value …]\n\n"
        "From raw web crawl to a trained Transformer.\n\n"
        f"verbs:\n{verbs}\n\n"
        f"  CONFIG     {CONFIG_HELP}\n"
        f"  key=value  {OVERRIDE_HELP}\n\n"
        "options:\n"
        "  -h, --help     this text; after a verb, its own\n"
        "  -V, --version  the version\n\n"
        f"example: {VERBS['show'].example}\n"
    )


def build_parser(name: str) -> VerbParser:
    """Return the parser of one verb: the arguments of every verb, and its own.

    Args:
        name: one of `VERBS`.

    Returns:
        The parser, which has imported the module of the verb.
    """
    verb = VERBS[name]
    parser = VerbParser(
        prog=f"llmsys {name}",
        description=f"{verb.summary[0].upper()}{verb.summary[1:]}.",
        epilog=f"example: {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # an abbreviation could change its meaning with every new option
        allow_abbrev=False,
    )
    if verb.takes_config:
        parser.add_argument(
            "config",
            metavar="CONFIG",
            help=CONFIG_HELP,
            nargs="?" if verb.config_optional else None,
        )
        parser.add_argument(
            "overrides", metavar="section.key=value", nargs="*", default=[], help=OVERRIDE_HELP
        )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    if verb.runs_code:
        parser.add_argument("--trust-code", action="store_true", help=TRUST_HELP)
    module = importlib.import_module(f"llmsys.launch.commands.{name}")
    module.add_arguments(parser)
    parser.own_names = getattr(module, "OWN_NAMES", ())
    if name == "completion":  # it completes the options of all verbs, and is below this module
        parser.set_defaults(build_parser=build_parser)
    return parser


def _run_command(name: str, words: Sequence[str], before_verb: Callable[[str], None]) -> int:
    parser = build_parser(name)
    # parse_args takes no overrides behind an option that follows CONFIG
    arguments = parser.parse_intermixed_args(words)
    # a key of a section has a dot, and a mistaken option or word of a verb has none
    words_alone = [
        word for word in getattr(arguments, "overrides", ()) if "." not in word.partition("=")[0]
    ]
    if words_alone:
        parser.check_overrides(words_alone)
    if os.environ.get("LLMSYS_PARENT"):
        from llmsys.launch.process.parent_watch import die_with_parent

        die_with_parent()
    from llmsys.log import configure_logging

    configure_logging()
    before_verb(name)
    from llmsys.config.loading import trusted_code

    consent = os.environ.get(trusted_code.VARIABLE)
    if getattr(arguments, "trust_code", False):
        trusted_code.trust_code_of_command()
    if any(word.startswith("s3://") for word in words):
        from llmsys.launch.commands.remote_folders import fetch_named_folders

        fetch_named_folders(name, arguments)
    try:
        status: int = importlib.import_module(f"llmsys.launch.commands.{name}").run(arguments)
    finally:  # of this command alone, where Python calls several
        os.environ.pop(trusted_code.VARIABLE, None)
        if consent is not None:
            os.environ[trusted_code.VARIABLE] = consent
    # a closed pipe must show while its error can still be caught
    sys.stdout.flush()
    return status


def _print_error(error: LlmsysError, *, as_json: bool) -> int:
    """Print an error for people to stderr and, with --json, as one object to stdout; return its
    exit status.
    """
    print(f"llmsys: error: {error}", file=sys.stderr)
    if as_json:
        _print_json_error(type(error).__name__, str(error), error.exit_status)
    return error.exit_status


def _print_json_error(kind: str, message: str, status: int) -> None:
    print(json.dumps({"error": {"kind": kind, "message": message, "status": status}}))


def _suggest_command(word: str) -> str:
    meant = suggest_verb(word)
    return f" Did you mean {meant}?" if meant else ""


if __name__ == "__main__":
    sys.exit(main())
