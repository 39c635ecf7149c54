"""LaTeX commands for the characters and names of MathML.

Characters that are not listed stay as they are: LaTeX engines of today read Unicode.
"""

_GREEK = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "epsilon",
    "zeta",
    "eta",
    "theta",
    "iota",
    "kappa",
    "lambda",
    "mu",
    "nu",
    "xi",
    "omicron",
    "pi",
    "rho",
    "varsigma",
    "sigma",
    "tau",
    "upsilon",
    "phi",
    "chi",
    "psi",
    "omega",
]
_NO_COMMAND = frozenset(["omicron"])
# capitals that look like Latin letters have no command
_GREEK_CAPITALS = {
    "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma",
    "Υ": "Upsilon", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "ϑ": "vartheta", "ϕ": "phi",
    "φ": "varphi", "ϱ": "varrho", "ϖ": "varpi", "ε": "varepsilon", "ϵ": "epsilon",
}  # fmt: skip
_SIGNS = {
    "∑": "sum", "∏": "prod", "∐": "coprod", "∫": "int", "∬": "iint", "∭": "iiint", "∮": "oint",
    "⋃": "bigcup", "⋂": "bigcap", "⨁": "bigoplus", "⨂": "bigotimes", "⋁": "bigvee",
    "⋀": "bigwedge", "∞": "infty", "∂": "partial", "∇": "nabla", "ℏ": "hbar", "ℓ": "ell",
    "ℜ": "Re", "ℑ": "Im", "ℵ": "aleph", "∅": "emptyset", "∀": "forall", "∃": "exists",
    "∄": "nexists", "¬": "neg", "∠": "angle", "△": "triangle", "□": "square", "⊤": "top",
    "⊥": "perp", "…": "ldots", "⋯": "cdots", "⋮": "vdots", "⋱": "ddots", "†": "dagger",
    "‡": "ddagger", "°": "circ", "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil", "⌉": "rceil",
    "⟨": "langle", "⟩": "rangle", "〈": "langle", "〉": "rangle", "‖": "Vert", "∥": "parallel",
    "∣": "mid", "∴": "therefore", "∵": "because",
    "ℕ": "mathbb{N}", "ℤ": "mathbb{Z}", "ℚ": "mathbb{Q}", "ℝ": "mathbb{R}", "ℂ": "mathbb{C}",
    "ℙ": "mathbb{P}", "ℍ": "mathbb{H}", "𝔼": "mathbb{E}", "𝟙": "mathbb{1}",
}  # fmt: skip
_BINARY_OPERATORS = {
    "±": "pm", "∓": "mp", "×": "times", "÷": "div", "·": "cdot", "⋅": "cdot", "∗": "ast",
    "⋆": "star", "∘": "circ", "∙": "bullet", "∪": "cup", "∩": "cap", "⊎": "uplus", "∨": "vee",
    "∧": "wedge", "⊕": "oplus", "⊖": "ominus", "⊗": "otimes", "⊙": "odot", "∖": "setminus",
    "≤": "leq", "⩽": "leq", "≥": "geq", "⩾": "geq", "≠": "neq", "≪": "ll", "≫": "gg", "≈": "approx",
    "≃": "simeq", "≅": "cong", "≡": "equiv", "∼": "sim", "∝": "propto", "≐": "doteq",
    "≺": "prec", "≻": "succ", "∈": "in", "∉": "notin", "∋": "ni", "⊂": "subset", "⊃": "supset",
    "⊆": "subseteq", "⊇": "supseteq", "⊊": "subsetneq", "⊢": "vdash", "⊨": "models",
    "→": "to", "←": "leftarrow", "↔": "leftrightarrow", "⇒": "Rightarrow", "⇐": "Leftarrow",
    "⇔": "Leftrightarrow", "⟶": "longrightarrow", "⟵": "longleftarrow", "⟹": "Longrightarrow",
    "⟺": "iff", "↦": "mapsto", "↑": "uparrow", "↓": "downarrow", "↪": "hookrightarrow",
    "⇌": "rightleftharpoons", "≔": "coloneqq",
}  # fmt: skip
_SPECIAL = {
    "\\": "\\backslash", "{": "\\{", "}": "\\}", "%": "\\%", "#": "\\#", "&": "\\&", "$": "\\$",
    "_": "\\_", "^": "\\hat{}", "~": "\\sim", "−": "-", "′": "'", "″": "''", "‴": "'''",
    "\u2061": "", "\u2062": "", "\u2063": "", "\u2064": "", "\u200b": "", "\ufe00": "", "\xa0": " ",
}  # fmt: skip

COMMANDS: dict[str, str] = (
    {
        chr(ord("α") + number): f"\\{name}"
        for number, name in enumerate(_GREEK)
        if name not in _NO_COMMAND
    }
    | {
        character: f"\\{name}"
        for table in (_GREEK_CAPITALS, _SIGNS, _BINARY_OPERATORS)
        for character, name in table.items()
    }
    | _SPECIAL
)
# operators with a space on each side between two operands
SPACED = frozenset([*_BINARY_OPERATORS, *"=<>+-−", ":=", "<=", ">=", "!=", "==", "->"]) - {"⋅", "∘"}
# operators whose scripts are limits
LARGE_OPERATORS = frozenset("∑∏∐∫∬∭∮⋃⋂⨁⨂⋁⋀")
FUNCTIONS = frozenset(
    [
        "arccos",
        "arcsin",
        "arctan",
        "arg",
        "cos",
        "cosh",
        "cot",
        "coth",
        "csc",
        "deg",
        "det",
        "dim",
        "exp",
        "gcd",
        "hom",
        "inf",
        "ker",
        "lg",
        "lim",
        "liminf",
        "limsup",
        "ln",
        "log",
        "max",
        "min",
        "Pr",
        "sec",
        "sin",
        "sinh",
        "sup",
        "tan",
        "tanh",
    ]
)
VARIANTS = {
    "bold": "mathbf", "bold-italic": "boldsymbol", "double-struck": "mathbb", "script": "mathcal",
    "bold-script": "mathcal", "fraktur": "mathfrak", "bold-fraktur": "mathfrak",
    "sans-serif": "mathsf", "monospace": "mathtt", "normal": "mathrm",
}  # fmt: skip
OVER_ACCENTS = {
    "¯": "bar", "‾": "overline", "ˉ": "bar", "^": "hat", "ˆ": "hat", "~": "tilde", "˜": "tilde",
    "→": "vec", "⃗": "vec", "˙": "dot", ".": "dot", "¨": "ddot", "ˇ": "check", "˘": "breve",
    "´": "acute", "`": "grave", "⏞": "overbrace", "_": "overline", "―": "overline",
}  # fmt: skip
UNDER_ACCENTS = {"⏟": "underbrace", "_": "underline", "¯": "underline", "‾": "underline"}
