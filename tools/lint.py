"""Check the language of the code: `python tools/lint.py [--stats] [FILE ...]`, part of `make
check`.

ruff, mypy and import-linter check form, types and import directions. This script checks what they
do not: names, docstrings and dispatch. Each finding is printed as `file:line: CODE message`; the
exit status is 1 if there is one that is no warning.

LS001  a function name begins with a verb from `VERBS` (see CONTRIBUTING.md to add one)
LS002  a function name is not a lone participle (`priced`)
LS003  a function name does not end in `_of` or `_at`
LS004  a docstring does not open with What, Whether, Which, How, Where, Who or Why
LS005  a function that another package imports documents its `Args:` and `Returns:`
LS006  a `match` over classes, or over a `kind`, ends with `assert_never` in its last case
LS007  (warning) a file has at most 500 lines, a function at most 80 lines of code; docstrings,
       signatures and comments are free
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("llmsys", "data_pipeline", "launch", "tools")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
# A long file may still be one subject: size is worth a look, and no reason to delete a comment.
WARNINGS = frozenset({"LS007"})

# First words of function names. One meaning per verb: build_ object from config, compute_ work,
# get_ cheap, find_ may be None.
VERBS = frozenset(
    """
    abort accept accumulate acquire add adjust adopt advance align all allocate allow announce
    annotate append apply archive
    ask assemble assert assign attach average barrier begin bias bind bound branch break broadcast
    build cache
    calibrate call cancel cap capture cast catch change check choose claim classify clean clear clip
    close cluster
    collate collect combine compare compile complete compose compute concat configure connect
    consume continue convert
    copy correct count create cut damage deactivate decide decode decontaminate delay delete
    dequantize derive describe
    detach detect die discard dispatch divide double download downsample draw drill drop dump embed
    emit encode end
    enter erase escape estimate evaluate evict exchange execute exit expand explain export extend
    extract feed fetch
    fill filter find finish fit flatten flip flush fold follow format forward gather generate get
    group grow guard guess
    halt handle hash hide highlight hold identify ignore import index infer inflate inherit init
    initialize inject
    insert inspect install interpolate interrupt invert iter join judge keep kill label launch learn
    leave limit
    link list load localize locate lock log look make map mark mask match materialize measure merge
    minimize mix
    move name nest normalize notify number observe open optimize order orthogonalize overwrite pack
    pad parse
    partition pause peek permute pick pin place plan plot poll pool pop predict prefetch prefill
    prepare prepend
    preserve print process profile project propagate protect prune publish pull push put quantize
    quarantine query
    queue quote raise rank read receive recompute reconcile record recover recreate redact redirect
    reduce refresh
    register reject relax relay release reload remove render repair repeat replace replay report
    request require
    rerun reserve reset reshape reshard resolve restart restore resume resynchronize retry return
    reveal reverse
    revert rewind rewrite rotate round route run sample saturate save say scale scan schedule score
    search seed
    seek select send serialize serve set settle shard share shift shorten show shuffle shut signal
    simplify
    simulate skip sleep slice smooth sort space spawn spell split stack start step stop store stream
    strip submit
    subtract suggest sum summarize suppress suspend swap sweep switch sync synchronize take tell
    test tie tokenize
    touch trace track train transform translate transpose trigger trim truncate trust try tune
    unescape unlock
    unpack unpickle unstack unwrap update upload use validate verify view visit wait wake walk warm
    warn watch
    weigh widen withdraw wrap write zero
    """.split()  # noqa: SIM905 -- a list of words reads as prose
)
# Predicates and conversions, and `iter`-like words that Python itself uses as verbs.
PREFIXES = frozenset(
    {
        "is",
        "are",
        "has",
        "can",
        "must",
        "may",
        "uses",
        "needs",
        "contains",
        "from",
        "to",
        "as",
        "on",
    }
)
# Names that torch, the standard library or another library calls.
FOREIGN = frozenset(
    """
    main dependencies error forward backward backward_one_chunk extra_repr state_dict readable
    seekable writable
    readinto tolist
    loglikelihood loglikelihood_rolling chat_template
    do_GET do_POST
    """.split()  # noqa: SIM905 -- a list of words reads as prose
)
QUESTION = re.compile(r"(What|Whether|Which|How|Where|Who|Why)\b")
PARTICIPLE = re.compile(
    r"(?:[a-z]+ed|told|said|kept|dealt|made|heard|found|left|lost|taken|given|known|sent|built|cut|put)$"
)
IMPERATIVES_IN_ED = frozenset(
    {"embed", "feed", "seed", "need", "shed", "speed", "proceed", "cut", "put"}
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Violation:
    """One finding, at a line of a file."""

    path: Path
    line: int
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.code} {self.message}"


def is_property(node: Function) -> bool:
    """Return whether a decorator makes the function an attribute, which is named by a noun."""
    return any(
        "property" in ast.unparse(decorator) or ".setter" in ast.unparse(decorator)
        for decorator in node.decorator_list
    )


def find_name_violations(path: Path, node: Function) -> Iterator[Violation]:
    """Yield LS001 to LS003 for one function."""
    name = node.name.strip("_")
    if node.name.startswith("__") or not name or is_property(node) or name in FOREIGN:
        return
    first = name.split("_")[0]
    if "_" not in name and PARTICIPLE.match(name) and name not in IMPERATIVES_IN_ED:
        yield Violation(
            path,
            node.lineno,
            "LS002",
            f"`{node.name}` is a lone participle. Name the action: verb_object.",
        )
    elif first not in VERBS | PREFIXES:
        yield Violation(
            path,
            node.lineno,
            "LS001",
            f"`{node.name}` does not begin with a verb. Use verb_object, or add the verb to VERBS.",
        )
    if name.endswith(("_of", "_at")):
        yield Violation(
            path,
            node.lineno,
            "LS003",
            f"`{node.name}` ends in a preposition. Use get_, compute_ or find_ and an object.",
        )


def find_docstring_violations(path: Path, node: ast.AST) -> Iterator[Violation]:
    """Yield LS004 for a module, class or function."""
    assert isinstance(node, ast.Module | ast.ClassDef | Function)
    docstring = ast.get_docstring(node) or ""
    if found := QUESTION.match(docstring):
        line = getattr(node, "lineno", 1)
        yield Violation(
            path,
            line,
            "LS004",
            f"the docstring opens with {found.group()}. Begin with an imperative, such as Return.",
        )


def find_section_violations(path: Path, node: Function) -> Iterator[Violation]:
    """Yield LS005 for a function that is imported by another package."""
    docstring = ast.get_docstring(node) or ""
    if (
        any(argument.arg != "self" for argument in _list_arguments(node))
        and "Args:" not in docstring
    ):
        yield Violation(
            path,
            node.lineno,
            "LS005",
            f"`{node.name}` is used by another package and has no `Args:` section.",
        )
    returned = ast.unparse(node.returns) if node.returns is not None else "None"
    generates = returned.startswith(("Iterator", "Generator", "Iterable"))
    section = ("Yields:", "Returns:") if generates else ("Returns:",)
    if returned not in ("None", "NoReturn", "Never") and not any(
        word in docstring for word in section
    ):
        yield Violation(
            path,
            node.lineno,
            "LS005",
            f"`{node.name}` is used by another package and has no `Returns:` section.",
        )


def _list_arguments(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def find_match_violations(path: Path, node: ast.Match) -> Iterator[Violation]:
    """Yield LS006 for a `match` over classes, or over a `kind`, without `assert_never`."""
    patterns = [pattern for case in node.cases for pattern in ast.walk(case.pattern)]
    is_over_kinds = ast.unparse(node.subject).endswith("kind")
    if not is_over_kinds and not any(isinstance(pattern, ast.MatchClass) for pattern in patterns):
        return
    last = ast.unparse(node.cases[-1])
    if "assert_never" not in last:
        yield Violation(
            path,
            node.lineno,
            "LS006",
            "this match has no `case unreachable: assert_never(unreachable)`.",
        )


def count_code_lines(node: Function, lines: Sequence[str]) -> int:
    """Count the lines of a function without its signature, docstring, comments and blank lines.

    Args:
        node: The function.
        lines: The lines of its file.

    Returns:
        The number of the other lines.
    """
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if not body:
        return 0
    code = lines[body[0].lineno - 1 : node.end_lineno]
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in code)


def find_size_violations(path: Path, tree: ast.Module, lines: Sequence[str]) -> Iterator[Violation]:
    """Yield LS007 for a file and its functions."""
    num_lines = len(lines)
    if num_lines > MAX_FILE_LINES:
        yield Violation(
            path,
            num_lines,
            "LS007",
            f"{num_lines} lines are more than {MAX_FILE_LINES}. Split the file by idea.",
        )
    for node in ast.walk(tree):
        if isinstance(node, Function):
            length = count_code_lines(node, lines)
            if length > MAX_FUNCTION_LINES:
                yield Violation(
                    path,
                    node.lineno,
                    "LS007",
                    f"`{node.name}` has {length} lines of code, more than {MAX_FUNCTION_LINES}. "
                    "Split it by steps.",
                )


def list_files() -> list[Path]:
    """Return the Python files of the product."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def list_shared_functions(trees: dict[Path, ast.Module]) -> set[tuple[Path, str]]:
    """Return (file, function) for module-level functions that a file of another folder imports.

    Args:
        trees: The parsed product.

    Returns:
        The functions LS005 holds for. Imports by tools do not count: scripts are read as a whole.
    """
    shared = set()
    for path, tree in trees.items():
        if path.relative_to(ROOT).parts[0] == "tools":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                # llmsys/launch and llmsys/data_pipeline are links.
                source = (ROOT / (node.module.replace(".", "/") + ".py")).resolve()
                if source.parent != path.parent:
                    shared |= {(source, alias.name) for alias in node.names}
    return shared


def find_violations(
    path: Path, tree: ast.Module, shared: set[tuple[Path, str]]
) -> Iterator[Violation]:
    """Yield every finding of one file, in no special order."""
    yield from find_size_violations(path, tree, path.read_text().splitlines())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield from find_docstring_violations(path, node)
        if isinstance(node, Function):
            yield from find_name_violations(path, node)
        if isinstance(node, ast.Match):
            yield from find_match_violations(path, node)
    for statement in tree.body:
        if isinstance(statement, Function) and (path, statement.name) in shared:
            yield from find_section_violations(path, statement)


def print_stats(trees: dict[Path, ast.Module]) -> None:
    """Print the shares that the rules hold: verbs, participles, `_of`, question docstrings,
    comments.
    """
    functions = [
        node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, Function) and not node.name.startswith("__") and not is_property(node)
    ]
    names = [node.name.strip("_") for node in functions]
    verbs = sum(name.split("_")[0] in VERBS | PREFIXES or name in FOREIGN for name in names)
    lone = sum(
        "_" not in name and bool(PARTICIPLE.match(name)) and name not in IMPERATIVES_IN_ED
        for name in names
    )
    documented = [
        ast.get_docstring(node) or ""
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node)
    ]
    questions = sum(bool(QUESTION.match(text)) for text in documented)
    lines = [line for path in trees for line in path.read_text().splitlines()]
    comments = sum(bool(re.search(r"(^|\s)#\s", line)) for line in lines)
    print(f"files {len(trees)}, lines {len(lines)}, functions {len(functions)}")
    print(
        f"verb first {verbs / len(names):.1%}, lone participles {lone}, "
        f"_of {sum(name.endswith('_of') for name in names)}"
    )
    print(
        f"question docstrings {questions / len(documented):.1%}, comments "
        f"{comments / len(lines):.1%} of lines"
    )


def main() -> int:
    """Check the named files, or all; return the exit status."""
    parser = argparse.ArgumentParser(description="Check names, docstrings and dispatch.")
    parser.add_argument("files", nargs="*", type=Path, help="files to check (default: the product)")
    parser.add_argument(
        "--stats", action="store_true", help="print the measured shares and check nothing"
    )
    arguments = parser.parse_args()
    trees = {path: ast.parse(path.read_text()) for path in list_files()}
    if arguments.stats:
        print_stats(trees)
        return 0
    shared = list_shared_functions(trees)
    wanted = [path.resolve() for path in arguments.files] or list(trees)
    violations = [
        one
        for path in wanted
        for one in find_violations(path, trees.get(path) or ast.parse(path.read_text()), shared)
    ]
    for violation in sorted(violations, key=lambda one: (one.path, one.line, one.code)):
        print(violation)
    warnings = sum(one.code in WARNINGS for one in violations)
    if violations:
        print(
            f"{len(violations) - warnings} findings, {warnings} warnings. "
            "The rules are in CONTRIBUTING.md."
        )
    return 1 if len(violations) > warnings else 0


if __name__ == "__main__":
    sys.exit(main())
