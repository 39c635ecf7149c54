"""Laws of licenses: tags of SPDX, wording of headers, short statements, fields of the input."""

import pytest

from llmsys.data_pipeline.text.licenses import convert_field, find_license, is_allowed

BSD = """Redistribution and use in source and binary forms, with or without
modification, are permitted provided that the following conditions are met:
1. Redistributions of source code must retain the above copyright notice.
2. Redistributions in binary form must reproduce the above copyright notice.
"""
GNU = """This program is free software; you can redistribute it and/or modify
it under the terms of the GNU {} General Public License as published by
the Free Software Foundation; either version {} of the License, or
(at your option) any later version. You should have received a copy of the
GNU General Public License along with this program.
"""
ISC = """Permission to use, copy, modify, and/or distribute this software for any
purpose with or without fee is hereby granted"""
MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software")."""


def comment(text: str, mark: str) -> str:
    """Return a text as a comment with a mark at every line, and code behind it."""
    return "".join(f"{mark} {line}\n" for line in text.splitlines()) + "x = 1\n"


@pytest.mark.parametrize("mark", ["#", " *", "//", "--", ";;", "%", ""])
@pytest.mark.parametrize(
    ("text", "license"),
    [
        (MIT, "MIT"),
        ("Licensed under the Apache License, Version 2.0 (the\n\"License\");", "Apache-2.0"),
        (BSD, "BSD-2-Clause"),
        (BSD + "3. Neither the name of the author nor", "BSD-3-Clause"),
        (BSD + "3. All advertising materials mentioning\nfeatures", "BSD-4-Clause"),
        (ISC + ", provided that the above copyright notice", "ISC"),
        (ISC + ".", "0BSD"),
        ("This Source Code Form is subject to the terms of the Mozilla Public\n"
         "License, v. 2.0.", "MPL-2.0"),
        (GNU.format("", 2), "GPL-2.0-or-later"),
        (GNU.format("", 3), "GPL-3.0-or-later"),
        (GNU.format("Lesser", 2.1), "LGPL-2.1-or-later"),
        (GNU.format("Library", 2), "LGPL-2.0-or-later"),
        (GNU.format("Affero", 3), "AGPL-3.0-or-later"),
        ("This file is released under version 2 of the GNU General\nPublic License.",
         "GPL-2.0-only"),
        ("This is licensed under the GPL, version 2.", "GPL-2.0-only"),
        ("Licensed under GPLv3+", "GPL-3.0-or-later"),
        ("under the terms of the GNU General Public License.", "GPL-1.0-or-later"),
        ("Dual licensed under the MIT or GPL Version 2 licenses.", "MIT OR GPL-2.0-only"),
        ("This is free and unencumbered software released into the\npublic domain.", "Unlicense"),
        ("http://creativecommons.org/publicdomain/zero/1.0/ is its license", "CC0-1.0"),
        ("you can redistribute it under the same terms as Perl itself",
         "Artistic-1.0-Perl OR GPL-1.0-or-later"),
        ("This file is released under the MIT license.", "MIT"),
        ("Released under the terms of the MIT Licence.", "MIT"),
        ("License: BSD 3-Clause", "BSD-3-Clause"),
        ("Use is governed by a BSD-style license in the file LICENSE.", "unknown"),
        ("All rights reserved. Permission is granted to nobody.", "unknown"),
        ("Permits the limit of GPL compatible emitters.", "unknown"),
    ],
)  # fmt: skip
def test_the_wording_of_a_header_in_any_comment(text: str, license: str, mark: str) -> None:
    assert find_license(comment(text, mark)) == license


@pytest.mark.parametrize(
    ("tag", "license"),
    [
        ("# SPDX-License-Identifier: MIT", "MIT"),
        ("/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */",
         "GPL-2.0-only WITH Linux-syscall-note"),
        ("// SPDX-License-Identifier: (GPL-2.0+ OR bsd-3-clause)",
         "GPL-2.0-or-later OR BSD-3-Clause"),
        ("<!-- SPDX-License-Identifier: Apache-2.0 -->", "Apache-2.0"),
        ("# SPDX-License-Identifier: MIT\n# SPDX-License-Identifier: ISC", "MIT AND ISC"),
        ("tag = 'SPDX-License-Identifier: MIT'", "unknown"),
    ],
)  # fmt: skip
def test_a_tag_decides(tag: str, license: str) -> None:
    wording = "" if license == "unknown" else comment(GNU.format("", 2), "#")
    assert find_license(f"#!/bin/sh\n{tag}\n{wording}") == license


def test_a_statement_at_the_end_of_a_long_file_is_found() -> None:
    assert find_license("x = 1\n" * 5_000 + comment(MIT, "#")) == "MIT"
    assert find_license("x = 1\n" * 5_000 + comment(MIT, "#") + "x = 1\n" * 5_000) == "unknown"


@pytest.mark.parametrize(
    ("value", "license"),
    [
        ("mit", "MIT"),
        ("Apache License 2.0", "Apache-2.0"),
        ("gpl-3.0", "GPL-3.0-only"),
        (["MIT", "Apache-2.0", "mit"], "Apache-2.0 AND MIT"),
        ("MIT OR Apache-2.0", "MIT OR Apache-2.0"),
        (["MIT OR ISC", "Zlib"], "(MIT OR ISC) AND Zlib"),
        ("BSD 3-Clause License", "BSD-3-Clause"),
        ("no_license", "unknown"),
        ([], "unknown"),
        (None, "unknown"),
    ],
)
def test_a_field_of_the_input(value: object, license: str) -> None:
    assert convert_field(value) == license


@pytest.mark.parametrize(
    ("license", "allowed", "fits"),
    [
        ("MIT", "mit", True),
        ("MIT OR GPL-2.0-only", "mit", True),
        ("MIT AND GPL-2.0-only", "mit", False),
        ("(MIT OR ISC) AND Zlib", "mit zlib", False),
        ("GPL-2.0-or-later", "gpl-2.0", True),
        ("GPL-2.0-or-later", "gpl-2.0-only", False),
        ("GPL-2.0-only WITH Linux-syscall-note", "gpl-2.0", True),
    ],
)
def test_a_choice_needs_one_license_and_a_sum_all(license: str, allowed: str, fits: bool) -> None:
    assert is_allowed(license, frozenset(allowed.split())) == fits
