"""LaTeX of an answer as a formula that sympy's parser reads: ``\\frac{1}{2}`` is ``1/2``.

Only what stands in answers; the conversion follows pylatexenc's ``LatexNodes2Text``, which the graders that
were published with it have in place of this module.
"""

import re

_SYMBOLS = {
    "pi": "pi",
    "infty": "inf",
    "cup": "U",
    "cap": "∩",
    "cdot": "*",
    "times": "*",
    "div": "÷",
    "pm": "±",
    "mp": "∓",
    "leq": "≤",
    "le": "≤",
    "geq": "≥",
    "ge": "≥",
    "neq": "≠",
    "ne": "≠",
    "in": "∈",
    "to": "→",
    "circ": "∘",
    "degree": "°",
    "emptyset": "∅",
    "varnothing": "∅",
    "theta": "θ",
    "alpha": "α",
    "beta": "β",
    "gamma": "γ",
    "delta": "δ",
    "lambda": "λ",
    "mu": "μ",
    "omega": "ω",
    "phi": "ϕ",
    "sigma": "σ",
    "ldots": "…",
    "dots": "…",
    "cdots": "⋯",
    "lfloor": "⌊",
    "rfloor": "⌋",
    "lceil": "⌈",
    "rceil": "⌉",
    "langle": "⟨",
    "rangle": "⟩",
    "quad": "  ",
    "qquad": "    ",
    "%": "%",
    "$": "$",
    "&": "&",
    "#": "#",
    "_": "_",
    "{": "{",
    "}": "}",
    " ": " ",
    ",": " ",
    ";": " ",
    ":": " ",
    "\\": "\n",
}
_FUNCTIONS_TEXT = """
sin cos tan cot sec csc arcsin arccos arctan log ln exp min max gcd mod lim
"""
_FUNCTIONS = frozenset(_FUNCTIONS_TEXT.split())
_COMMAND = re.compile(r"\\([A-Za-z]+|.)[ \t]*", re.DOTALL)


def latex_to_text(latex: str) -> str:
    """The text of a formula; commands without a meaning here vanish and leave what they enclose."""
    latex = latex.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac")
    # A space before it, so that 1\frac{1}{2} stays a mixed number.
    return _Reader(latex.replace("\\frac", " \\frac")).text().strip()


class _Reader:
    """Reads a formula from left to right."""

    def __init__(self, latex: str) -> None:
        self._latex = latex
        self._at = 0

    def text(self, end: str = "") -> str:
        """Up to the closing brace ``end``, which is read too, or to the end of the formula."""
        parts = []
        while self._at < len(self._latex):
            if end and self._latex[self._at] == end:
                self._at += 1
                break
            parts.append(self._next())
        return "".join(parts)

    def _next(self) -> str:
        character = self._latex[self._at]
        if character == "\\" and (match := _COMMAND.match(self._latex, self._at)):
            self._at = match.end() if match[1].isalpha() else match.end(1)
            return self._command(match[1])
        self._at += 1
        if character == "{":
            return self.text("}")
        return {"$": "", "}": "", "~": " "}.get(character, character)

    def _command(self, name: str) -> str:
        if name == "frac":
            return f"{self._argument()}/{self._argument()}"
        if name == "sqrt":
            return self._root()
        if name in ("binom", "dbinom"):
            return f"({self._argument()} choose {self._argument()})"
        if name == "begin":
            return self._environment(self._argument())
        return name if name in _FUNCTIONS else _SYMBOLS.get(name, "")

    def _environment(self, name: str) -> str:
        """A matrix row by row, as ``[ 1 2; 3 4 ]``; the content of anything else."""
        inside, _, self._latex = self._latex[self._at :].partition(f"\\end{{{name}}}")
        self._at = 0
        if "matrix" not in name and name != "array":
            return _Reader(inside).text()
        rows = [
            " ".join(_Reader(cell).text().strip() for cell in row.split("&")) for row in inside.split("\\\\")
        ]
        return f"[ {'; '.join(rows)} ]"

    def _root(self) -> str:
        degree = ""
        if self._latex[self._at : self._at + 1] == "[":
            self._at += 1
            degree = self.text("]")
        root = f"sqrt({self._argument()})"
        return f"root({degree})({root[5:-1]})" if degree else root

    def _argument(self) -> str:
        while self._latex[self._at : self._at + 1].isspace():
            self._at += 1
        return self._next() if self._at < len(self._latex) else ""
