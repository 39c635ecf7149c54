"""Names of the programming languages of source files: by file name, then content, then shebang.

The table of file names is that of Pygments (`pygments.lexers.get_all_lexers`), which imports no
lexer. Names are Pygments' too, or those of GitHub's Linguist where `_NAMES` says so, because The
Stack and StarCoder2's data have them. File names that Pygments lacks are in `_MORE`.

Invariants:
- A file name that stands for several languages is decided by the content, or is `unknown`: no
  language is guessed.
- The result depends on the path and the text alone.
"""

import fnmatch
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import PurePosixPath

from llmsys.config.source_code import UNKNOWN

_HEAD = 20_000  # characters that decide between languages

# Linguist's names by Pygments'.
_NAMES = {
    "Bash": "Shell",
    "Docker": "Dockerfile",
    "EmacsLisp": "Emacs Lisp",
    "FortranFixed": "Fortran",
    "GAS": "Assembly",
    "JSX": "JavaScript",
    "Lean4": "Lean",
    "LessCss": "Less",
    "Literate Haskell": "Haskell",
    "NASM": "Assembly",
    "Nimrod": "Nim",
    "Perl6": "Raku",
    "Rocq Prover": "Coq",
    "S": "R",
    "TASM": "Assembly",
    "Text only": "Text",
    "VB.net": "Visual Basic .NET",
    "aspx-cs": "ASP.NET",
    "aspx-vb": "ASP.NET",
    "ca65 assembler": "Assembly",
    "systemverilog": "SystemVerilog",
    "verilog": "Verilog",
    "vhdl": "VHDL",
}

# File names that Pygments has not, by language.
_MORE = {
    "AsciiDoc": "*.adoc *.asciidoc",
    "Bison": "*.y *.yy",
    "C++": "*.tcc *.ipp *.txx *.inl",
    "CSV": "*.csv",
    "Fortran": "*.for *.f95 *.f08 *.fpp",
    "GLSL": "*.glsl",
    "Go Module": "go.mod go.sum",
    "HTML+EJS": "*.ejs",
    "HTML+ERB": "*.erb",
    "JSON": "*.geojson *.webmanifest *.map .babelrc .eslintrc",
    "Jinja": "*.jinja *.jinja2 *.j2",
    "Jupyter Notebook": "*.ipynb",
    "Linker Script": "*.ld *.lds",
    "Lex": "*.l",
    "M4": "*.m4 *.ac",
    "Makefile": "*.am",
    "Perl": "*.al *.pod",
    "Scala": "*.sbt",
    "Svelte": "*.svelte",
    "TeX": "*.sty *.ltx *.dtx *.bbx *.cbx",
    "Text": "README LICENSE LICENCE COPYING NEWS AUTHORS CHANGES ChangeLog INSTALL TODO",
    "XML": "*.plist",
}

# Contents by file name: the first that is found decides, and "" any other content. Pygments gives
# these names to several languages, or to one though others have them too. A pattern begins at the
# start of a line (^) or has a literal beginning, by which `re` finds it fast.
_C_PLUS_PLUS = (
    r"^[ \t]*(?:class\s+(?:\w+\s+)?\w+\s*(?:final\s*)?[{;:]|struct\s+\w+\s*(?:final\s*)?:\s*\w|"
    r"enum class\s|(?:inline )?namespace(?:\s+[\w:]+)?\s*\{|template\s*<|using\s+[\w:]+\s*[;=]|"
    r"(?:public|private|protected)\s*:|virtual\s+[A-Za-z_~]|#\s*include\s*<(?:ext/\w+\.h|[a-z_]+)>)"
)
_OBJECTIVE_C = r"^[ \t]*(?:@(?:interface|protocol|implementation|class|end|import)\b|#\s*import\s)"
_PERL = (
    r"^[ \t]*(?:use\s+(?:v?\d|[\w:]+[^=<>;\n]*;)|package\s+[\w:]+|sub\s+\w+|"
    r"=(?:head\d|pod|cut|encoding)\b|(?:my|our|local)\s*[($@%]|[$@%][\w:]+\s*=|"
    r"require\s+['\"\w]|return <<|unless\b|\+\{|1;[ \t]*$|__(?:END|DATA)__)"
)
_PROLOG = r"^(?:\s*:-\s|[a-z]\w*(?:\([^()\n]*\))?\s*:-)"
_RAKU = r"^[ \t]*(?:use\s+v6|unit\s+(?:module|class)\s)"
_CONTENTS: dict[str, tuple[tuple[str, str], ...]] = {
    ".as": (("ActionScript", r"^[ \t]*(?:package|import flash|class|function|var)\b"),),
    ".asm": (("Assembly", ""),),
    ".bas": (
        ("Visual Basic .NET", r"^[ \t]*(?:Imports|Namespace|Public (?:Module|Class))\b"),
        ("VBA", r"^Attribute VB_"),
    ),
    ".cl": (
        ("OpenCL", r"^[ \t]*(?:__?kernel\b|__global\b)"),
        ("OpenCL", r"get_global_id"),
        ("Common Lisp", r"^[ \t]*\((?:def|in-package|load|setq|eval-when)"),
    ),
    ".cls": (
        ("TeX", r"^[ \t]*\\(?:NeedsTeXFormat|ProvidesClass|ProvidesExplClass|newcommand|def)\b"),
        ("VBA", r"^(?:VERSION 1\.0 CLASS|Attribute VB_)"),
        ("Apex", r"^[ \t]*(?:public|global|private)\b.*\bclass\b"),
    ),
    ".d": (
        ("D", r"^[ \t]*(?:module\s+[\w.]+;|import\s+[\w.]+\s*[;:,=])"),
        ("DTrace", r"^[ \t]*(?:provider\s+\w+\s*\{|#pragma D|\w*:\w*:\w*:\w+)"),
        ("Makefile", r"^[^\s:#]+\s*:\s"),
    ),
    ".def": (("Modula-2", r"^[ \t]*DEFINITION MODULE\b"),),
    ".ecl": (("ECL", r"^[ \t]*(?:IMPORT|EXPORT)\b"), ("ECL", ":="), ("Prolog", _PROLOG)),
    ".feature": (("Gherkin", ""),),
    ".fs": (
        ("GLSL", r"^[ \t]*(?:#version\b|uniform\s)"),
        ("GLSL", "gl_FragColor"),
        ("Forth", r"^(?:: \S|\\ )"),
        ("F#", r"^[ \t]*(?:let|module|namespace|open|type)\s"),
    ),
    ".g": (
        ("ANTLR", r"^[ \t]*(?:(?:lexer|parser|tree)\s+)?grammar\s+\w+\s*;"),
        ("GAP", r"^[ \t]*(?:[\w.]+\s*:=|Declare\w+\()"),
    ),
    ".gd": (
        ("GAP", r"^[ \t]*Declare\w+\("),
        ("GDScript", r"^(?:extends|func|class_name|tool|@tool)\b"),
    ),
    ".h": (
        ("Objective-C", _OBJECTIVE_C),
        ("C++", _C_PLUS_PLUS),
        ("C++", r"std::"),
        ("C++", r"constexpr\b"),
        ("C", ""),
    ),
    ".hh": (("C++", ""),),
    ".inc": (
        ("PHP", r"<\?php"),
        ("POV-Ray SDL", r"^[ \t]*#(?:declare|macro|local)\s+\w"),
        ("Pawn", r"^[ \t]*(?:native|stock|forward)\s+\w"),
    ),
    ".inf": (
        ("INI", r"^[ \t]*\[[\w. ]+\]"),
        ("Inform 6", r"^[ \t]*(?:Object|Class|Constant)\s"),
    ),
    ".lean": (("Lean", ""),),
    ".m": (
        ("Objective-C", _OBJECTIVE_C),
        ("Mathematica", r"^[ \t]*\(\*"),
        ("Mason", r"^<%"),
        ("Octave", r"^[ \t]*(?:##|endfunction\b)"),
        ("MATLAB", r"^[ \t]*(?:%|function\b|classdef\b)"),
    ),
    ".mm": (
        ("Objective-C++", r"^[ \t]*(?:#\s*(?:import|include)\b|@\w|//)"),
        ("Objective-C++", r"std::"),
    ),
    ".mod": (
        ("Modula-2", r"^[ \t]*(?:IMPLEMENTATION\s+|DEFINITION\s+)?MODULE\b"),
        ("AMPL", r"^[ \t]*(?:param|var|minimize|maximize)\s"),
    ),
    ".ph": (
        ("Perl", _PERL),
        ("Visual Prolog", r"^[ \t]*(?:class|interface)\s"),
    ),
    ".pl": (("Raku", _RAKU), ("Perl", _PERL), ("Prolog", _PROLOG)),
    ".pm": (
        ("Raku", _RAKU),
        ("Perl", _PERL),
        ("Promela", r"^[ \t]*(?:active\s+)?proctype\b"),
    ),
    ".pp": (
        ("Pascal", r"(?i)^[ \t]*(?:unit|program|library|interface|implementation|uses)\b"),
        ("Puppet", r"^[ \t]*(?:class|define|node|include|package|file|service|exec)\b"),
    ),
    ".pro": (
        ("Prolog", _PROLOG),
        ("QMake", r"^[ \t]*(?:TEMPLATE|SOURCES|HEADERS|CONFIG|QT|TARGET)\s*[+-]?="),
        ("IDL", r"(?i)^[ \t]*(?:pro|function)\s+\w+"),
    ),
    ".prolog": (("Prolog", ""),),
    ".r": (("REBOL", r"^[ \t]*REBOL\s*\["), ("R", "")),
    ".rl": (("Ragel", ""),),
    ".S": (("R", r"^[ \t]*[\w.]+\s*<-\s"), ("Assembly", "")),
    ".s": (("Assembly", ""),),
    ".sc": (
        ("SuperCollider", r"SynthDef\b"),
        ("SuperCollider", r"^[ \t]*\w+\s*:\s*\w+\s*\{\s*$"),
        ("Scala", r"^[ \t]*(?:object|import|val|def|package)\s"),
    ),
    ".scd": (
        ("SuperCollider", r"SynthDef\b"),
        ("SuperCollider", r"\.(?:ar\(|play\b)"),
        ("scdoc", r"^\S+\(\d\w*\)"),
    ),
    ".sql": (("SQL", ""),),
    ".t": (("Raku", _RAKU), ("Perl", _PERL)),
    ".toc": (
        ("TeX", r"^\\(?:contentsline|babel|select@language)"),
        ("World of Warcraft TOC", r"^## (?:Interface|Title)"),
    ),
    ".ts": (("XML", r"^<(?:\?xml|!DOCTYPE TS)"), ("TypeScript", "")),
    ".ttl": (("Turtle", r"(?i)^[ \t]*@?(?:prefix|base)\s"),),
    ".v": (
        ("Coq", r"^[ \t]*(?:Require|From \S+ Require|Theorem|Lemma|Proof|Definition|Inductive)\b"),
        ("Verilog", r"^[ \t]*(?:module\s+\w+\s*[(;#]|endmodule\b|`(?:timescale|define|include)\b)"),
        ("V", r"^[ \t]*(?:(?:pub\s+)?(?:fn|struct|enum)\s+\w|module\s+\w+\s*$)"),
    ),
    ".x": (
        ("Logos", r"^[ \t]*%(?:hook|ctor|group|new)\b"),
        ("RPC", r"^[ \t]*(?:program|struct|union|enum|typedef|const)\s+\w"),
    ),
    ".xsl": (("XSLT", ""),),
    ".xslt": (("XSLT", ""),),
}

# Interpreters whose name is no alias of their language.
_INTERPRETERS = {
    "ash": "Shell",
    "dash": "Shell",
    "deno": "TypeScript",
    "expect": "Tcl",
    "gawk": "Awk",
    "mawk": "Awk",
    "node": "JavaScript",
    "nodejs": "JavaScript",
    "pypy": "Python",
    "rscript": "R",
    "runghc": "Haskell",
    "tclsh": "Tcl",
    "wish": "Tcl",
}
_SHEBANG = re.compile(r"#!\s*(?:\S*/)?env\s+(?:-\S+\s+|\w+=\S*\s+)*(\S+)|#!\s*(\S+)")
_EMACS_MODE = re.compile(r"-\*-\s*(?:.*\bmode:\s*)?([\w+-]+)\s*(?:;.*)?-\*-", re.IGNORECASE)
_GLOB = re.compile(r"[*?\[]")


class LanguageTable:
    """File names, extensions and aliases of all languages. `get_language_table` shares one.

    Args:
        lexers: (name, aliases, file name patterns) of each language of Pygments.
    """

    def __init__(self, lexers: Iterable[tuple[str, Iterable[str], Iterable[str]]]) -> None:
        found: dict[str, set[str]] = {}
        self._aliases: dict[str, str] = {}
        more: dict[str, Iterable[str]] = {name: names.split() for name, names in _MORE.items()}
        rows = [
            (_NAMES.get(name, name), (name, *aliases), names) for name, aliases, names in lexers
        ]
        own = {name for names in more.values() for name in names}
        rows += [(name, (), names) for name, names in more.items()]
        for language, aliases, patterns in rows:
            for alias in (language, *aliases):
                self._aliases.setdefault(alias.casefold(), language)
            for pattern in patterns:
                if pattern not in own or language in more:
                    found.setdefault(pattern, set()).add(language)
        for language, _ in (choice for choices in _CONTENTS.values() for choice in choices):
            self._aliases.setdefault(language.casefold(), language)
        self._aliases[UNKNOWN] = UNKNOWN
        # A name of several languages that no content decides stands for none.
        single = {name: min(some) for name, some in found.items() if len(some) == 1}
        self._suffixes = {
            name[1:]: language
            for name, language in single.items()
            if name.startswith("*.") and not _GLOB.search(name[1:])
        }
        self._names = {name: one for name, one in single.items() if not _GLOB.search(name)}
        self._globs = [
            (re.compile(fnmatch.translate(name)), language)
            for name, language in single.items()
            if name not in self._names and name[1:] not in self._suffixes
        ]
        self._contents = {
            suffix: [(name, _compile_content(text)) for name, text in choices]
            for suffix, choices in _CONTENTS.items()
        }

    def find_name(self, alias: str) -> str | None:
        """Return the name of a language.

        Args:
            alias: Its name, or an alias of Pygments, in any letter case, such as `cpp`.

        Returns:
            The name that `find_language` uses, such as `C++`; None for no language.
        """
        return self._aliases.get(alias.casefold())

    def list_names(self) -> list[str]:
        """Return the names and aliases that `find_name` knows, in lower case."""
        return sorted(self._aliases)

    def find_language(self, path: str, text: str) -> str:
        """Return the language of a source file.

        Args:
            path: Path of the file, with forward slashes; "" if it is unknown.
            text: Its text.

        Returns:
            Name of the language, or `unknown`.
        """
        name = PurePosixPath(path).name
        found = self._find_by_name(name, text)
        return found or self._find_by_first_lines(text) or UNKNOWN

    def _find_by_name(self, name: str, text: str) -> str | None:
        if name in self._names:
            return self._names[name]
        for suffix in _iter_suffixes(name):
            if choices := self._contents.get(suffix):
                return self._find_by_first_lines(text) or _choose_by_content(choices, text)
            if language := self._suffixes.get(suffix):
                return language
        return next((one for glob, one in self._globs if glob.match(name)), None)

    def _find_by_first_lines(self, text: str) -> str | None:
        """Return the language that a shebang, or Emacs' mode in the first two lines, names."""
        head = text[:1_000].lstrip("\ufeff")
        if head.startswith("#!") and (match := _SHEBANG.match(head)):
            interpreter = PurePosixPath(match[1] or match[2]).name.lower()
            for name in (interpreter, re.sub(r"[\d.]+$", "", interpreter)):
                if language := _INTERPRETERS.get(name) or self._aliases.get(name):
                    return language
        if "-*-" not in head:
            return None
        match = _EMACS_MODE.search("\n".join(head.split("\n", 2)[:2]))
        return match and self._aliases.get(match[1].casefold())


def _iter_suffixes(name: str) -> Iterable[str]:
    """Yield the extensions of a file name, longest first, each as it is and in lower case."""
    parts = name.split(".")[1:]
    for start in range(len(parts)):
        suffix = "." + ".".join(parts[start:])
        yield suffix
        if suffix != suffix.lower():
            yield suffix.lower()


def _compile_content(text: str) -> re.Pattern[str]:
    """Compile a pattern; `re` skips to line feeds, but tries ^ at every character."""
    begins_line = text.removeprefix("(?i)").startswith("^")
    return re.compile(text.replace("^", "\n", 1) if begins_line else text, re.MULTILINE)


def _choose_by_content(choices: Iterable[tuple[str, re.Pattern[str]]], text: str) -> str | None:
    head = "\n" + text[:_HEAD]
    return next((name for name, content in choices if content.search(head)), None)


@lru_cache(maxsize=1)
def get_language_table() -> LanguageTable:
    """Return the table of this process.

    Returns:
        The languages of the installed Pygments.
    """
    from pygments.lexers import get_all_lexers  # an extra; its absence is reported before

    return LanguageTable(
        (name, aliases, files) for name, aliases, files, _ in get_all_lexers(False)
    )
