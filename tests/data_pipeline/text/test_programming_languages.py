"""Laws of the names of programming languages: file names, contents, first lines, unknown."""

import sysconfig
from pathlib import Path

import pytest
from pygments.lexers import get_all_lexers

from llmsys.data_pipeline.text.programming_languages import (
    _CONTENTS,
    _MORE,
    _NAMES,
    get_language_table,
)


@pytest.mark.parametrize(
    ("path", "text", "language"),
    [
        ("a/b.py", "", "Python"),
        ("a.PY", "", "Python"),
        ("Dockerfile", "", "Dockerfile"),
        ("lib/CMakeLists.txt", "", "CMake"),
        ("notes.txt", "", "Text"),
        ("a.tar.py", "", "Python"),
        ("a.blade.unheard", "", "unknown"),
        ("page.html.erb", "", "HTML+ERB"),
        ("Makefile.am", "", "Makefile"),
        ("pipe.1", "", "Groff"),
        ("a.R", "", "R"),
        ("a.r", "x <- 1\n", "R"),
        ("a.r", "REBOL [Title: 'a']", "REBOL"),
        ("a.ipynb", "{}", "Jupyter Notebook"),
        ("vec.h", "struct point { int x; };\n#ifdef __cplusplus\nextern \"C\" {\n", "C"),
        ("vec.h", "namespace geo {\nclass Point;\n}", "C++"),
        ("vec.h", "// a\n  template <class T>\nT get();", "C++"),
        ("vec.h", "/* a class of numbers: virtual 8086 */\nint f(void);\n", "C"),
        ("vec.h", "#import <Foundation/Foundation.h>\n", "Objective-C"),
        ("vec.h", "// -*- C++ -*-\nint f();\n", "C++"),
        ("a.m", "@implementation Point\n@end\n", "Objective-C"),
        ("a.m", "% doubles\nfunction y = twice(x)\ny = 2 * x;\n", "MATLAB"),
        ("a.m", "## doubles\nfunction y = twice(x)\nendfunction\n", "Octave"),
        ("a.m", "(* ::Package:: *)\nf[x_] := x\n", "Mathematica"),
        ("a.m", "hello", "unknown"),
        ("a.pl", "use strict;\nprint 1;\n", "Perl"),
        ("a.pl", "#!/usr/bin/perl -w\nprint 1;\n", "Perl"),
        ("a.pl", ":- module(a, [b/1]).\nb(X) :- c(X).\n", "Prolog"),
        ("a.pl", "parent(X, Y) :- father(X, Y).\n", "Prolog"),
        ("a.pl", "use v6;\nsay 1;\n", "Raku"),
        ("a.pl", "hello", "unknown"),
        ("a.v", "module top(input clk);\nendmodule\n", "Verilog"),
        ("a.v", "Require Import Arith.\nLemma a : True.\n", "Coq"),
        ("a.ts", "export const a = 1\n", "TypeScript"),
        ("a.ts", "<?xml version='1.0'?>\n<!DOCTYPE TS>\n", "XML"),
        ("a.fs", "let a = 1\n", "F#"),
        ("a.fs", ": twice 2 * ;\n", "Forth"),
        ("a.b", "hello", "unknown"),
        ("bin/run", "#!/bin/sh\nls\n", "Shell"),
        ("bin/run", "#!/usr/bin/env python3\n1\n", "Python"),
        ("bin/run", "#! /usr/bin/env -S node --harmony\n1\n", "JavaScript"),
        ("bin/run", "#!/opt/perl5.36\n1\n", "Perl"),
        ("bin/run", "#!/opt/unheard\n1\n", "unknown"),
        ("vector", "// The header -*- C++ -*-\n#include <bits/a.h>\n", "C++"),
        ("run.py", "#!/bin/sh\nls\n", "Python"),
        ("", "", "unknown"),
    ],
)  # fmt: skip
def test_the_language_of_a_file(path: str, text: str, language: str) -> None:
    assert get_language_table().find_language(path, text) == language


def test_content_is_asked_or_nothing_is_answered_where_pygments_has_several_languages() -> None:
    owners: dict[str, set[str]] = {}
    for name, _, patterns, _ in get_all_lexers(False):
        for pattern in patterns:
            owners.setdefault(pattern, set()).add(_NAMES.get(name, name))
    own = {pattern for patterns in _MORE.values() for pattern in patterns.split()}
    table = get_language_table()
    for pattern, names in owners.items():
        suffix = pattern[1:]
        if not suffix.startswith(".") or {"*", "?", "["} & set(suffix) or pattern in own:
            continue
        found = table.find_language(f"name{suffix}", "")
        if suffix not in _CONTENTS:
            assert found == ("unknown" if len(names) > 1 else min(names)), pattern


def test_aliases_name_languages() -> None:
    table = get_language_table()
    found = [table.find_name(name) for name in ("cpp", "C++", "JS", "bash", "S", "Python", "gibt")]
    assert found == ["C++", "C++", "JavaScript", "Shell", "R", "Python", None]


def test_the_standard_library_of_python_is_python() -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    table = get_language_table()
    assert len(files) > 100
    assert {table.find_language(str(path), "") for path in files} == {"Python"}
