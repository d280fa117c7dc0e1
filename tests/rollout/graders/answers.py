"""A table of answers: kind, label, answer, and whether a mathematician would call it right.

Built from formulas and forms. "Right" is about the value: a form that the label does not ask for, such as an
unreduced fraction, is right.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple


class Row(NamedTuple):
    """One line of the table."""

    kind: str
    gold: str
    answer: str
    right: bool


def _integers() -> Iterator[Row]:
    for n in (0, 1, 7, 12, 144, 1316, 65536, -3, -250):
        for form in (f"{n}", f"{n}.0", f" {n} ", f"${n}$", f"{{{n}}}", f"x={n}"):
            yield Row("integer", str(n), form, True)
        yield Row("integer", str(n), str(n + 1), False)
        yield Row("integer", str(n), f"{-n}", n == 0)
    for n in (1000, 12345, 1234567):
        for form in (
            f"{n:,}",
            f"{n:,}".replace(",", "{,}"),
            f"{n:,}".replace(",", ",\\!"),
            f"{n:,}".replace(",", "\\,"),
        ):
            yield Row("thousands", str(n), form, True)
            yield Row("thousands", form, str(n), True)
        yield Row("thousands", str(n), f"{n // 1000}", False)


def _fractions() -> Iterator[Row]:
    for a, b in ((1, 2), (3, 4), (-5, 8), (7, 3), (22, 7), (-1, 3)):
        gold, sign, up = f"\\frac{{{a}}}{{{b}}}", "-" if a < 0 else "", abs(a)
        if a < 0:
            gold = f"-\\frac{{{up}}}{{{b}}}"
        for form in (
            f"{a}/{b}",
            f"{sign}\\dfrac{{{up}}}{{{b}}}",
            f"{sign}\\tfrac{{{up}}}{{{b}}}",
            f"\\frac{{{a}}}{{{b}}}",
            f"\\frac{{{2 * a}}}{{{2 * b}}}",
            f"{sign}\\left(\\frac{{{up}}}{{{b}}}\\right)",
        ):
            yield Row("fraction", gold, form, True)
        if up < 10:
            yield Row("fraction", gold, f"{sign}\\frac{up}{b}", True)
        yield Row("fraction", gold, f"\\frac{{{b}}}{{{a}}}", False)
        yield Row("fraction", gold, f"\\frac{{{a + 1}}}{{{b}}}", False)
        if Fraction(a, b).denominator in (2, 4, 8):
            yield Row("decimal", gold, str(a / b), True)
            yield Row("decimal", str(a / b), gold, True)
            yield Row("decimal", gold, str(a / b + 0.1), False)
        else:
            yield Row("decimal", gold, f"{a / b:.2f}", False)
    for gold, answer, right in (
        ("0.5", ".5", True),
        ("0.5", "0.50", True),
        ("2.50", "2.5", True),
        ("0.125", "0.124", False),
        ("3.14", "\\pi", False),
        ("0.\\overline{3}", "\\frac{1}{3}", True),
        ("1.5e3", "1500", True),
        ("1.5\\times 10^3", "1500", True),
        ("6.02\\cdot 10^{23}", "6.02\\times 10^{23}", True),
        ("10^{-3}", "0.001", True),
    ):
        yield Row("decimal", gold, answer, right)


def _mixed_numbers() -> Iterator[Row]:
    for whole, a, b in ((1, 1, 2), (2, 3, 4), (10, 5, 8)):
        improper = f"\\frac{{{whole * b + a}}}{{{b}}}"
        for form in (f"{whole}\\frac{{{a}}}{{{b}}}", f"{whole} \\frac{{{a}}}{{{b}}}", f"{whole} {a}/{b}"):
            yield Row("mixed number", improper, form, True)
        yield Row("mixed number", improper, str(whole + a / b), True)
        yield Row("mixed number", improper, f"\\frac{{{whole * a}}}{{{b}}}", False)


def _percentages_and_units() -> Iterator[Row]:
    for n in (5, 25, 50, 120):
        yield Row("percentage", f"{n}\\%", f"{n}%", True)
        yield Row("percentage", f"{n}\\%", f"{n}", True)
        yield Row("percentage", f"{n}", f"{n}\\%", True)
        yield Row("percentage", f"{n}\\%", str(n / 100), True)
        yield Row("percentage", f"{n}\\%", f"{n + 1}\\%", False)
        for unit in ("\\text{ cm}", "\\text{cm}", "\\mathrm{cm}", " cm", "\\,\\text{cm}", "\\text{ cm}^2"):
            yield Row("unit", str(n), f"{n}{unit}", True)
        yield Row("unit", f"{n}\\text{{ cm}}", str(n), True)
        yield Row("unit", f"{n}", f"{n + 2}\\text{{ cm}}", False)
        for sign in ("^\\circ", "^{\\circ}", "°", "\\text{ degrees}"):
            yield Row("degrees", str(n), f"{n}{sign}", True)
        for money in (f"\\${n}", f"\\${n}.00", f"{n} dollars", f"{n}\\text{{ dollars}}"):
            yield Row("money", str(n), money, True)
    yield Row("money", "\\$3.50", "3.5", True)
    yield Row("money", "\\$1,000,000", "1 million", True)
    yield Row("unit", "3\\text{ hours}", "180\\text{ minutes}", True)


def _roots_and_constants() -> Iterator[Row]:
    for gold, rights, wrongs in (
        (
            "\\sqrt{2}",
            ("\\sqrt2", "2^{1/2}", "2^{\\frac{1}{2}}", "\\frac{2}{\\sqrt{2}}"),
            ("1.41", "\\sqrt{3}", "2"),
        ),
        ("2\\sqrt{3}", ("\\sqrt{12}", "2\\cdot\\sqrt{3}", "\\frac{6}{\\sqrt3}"), ("3\\sqrt{2}", "\\sqrt{6}")),
        (
            "\\frac{\\sqrt{2}}{2}",
            ("\\frac{1}{\\sqrt{2}}", "\\sqrt{\\frac12}", "\\sqrt{2}/2"),
            ("\\frac{\\sqrt2}{4}",),
        ),
        ("\\pi", ("{\\pi}", "\\pi ", "\\frac{2\\pi}{2}"), ("3.14", "2\\pi", "3")),
        ("\\frac{\\pi}{4}", ("\\pi/4", "0.25\\pi", "\\frac{1}{4}\\pi"), ("\\frac{4}{\\pi}", "45")),
        ("1+\\sqrt{5}", ("\\sqrt{5}+1", "1 + \\sqrt5"), ("1-\\sqrt{5}", "\\sqrt{6}")),
        ("e^2", ("e^{2}", "e\\cdot e"), ("2e", "7.39")),
        ("\\sqrt[3]{8}", ("2", "8^{1/3}"), ("3", "\\sqrt{8}")),
        ("\\log_2 8", ("3", "\\log_{2}{8}"), ("2", "8")),
        ("5!", ("120", "5\\cdot 4!"), ("25", "5")),
        ("\\binom{5}{2}", ("10", "\\dbinom{5}{2}"), ("20", "\\binom{5}{1}")),
        ("\\infty", ("\\infty", "+\\infty"), ("-\\infty", "0")),
        ("i", ("\\sqrt{-1}", "0+i"), ("-i", "1")),
        ("3+4i", ("4i+3", "3 + 4i"), ("3-4i", "5", "4+3i")),
        ("2^{10}", ("1024", "4^5"), ("2^{9}", "20")),
    ):
        yield from (Row("constant", gold, answer, True) for answer in (gold, *rights))
        yield from (Row("constant", gold, answer, False) for answer in wrongs)


def _algebra() -> Iterator[Row]:
    for gold, rights, wrongs in (
        ("x^2-1", ("(x-1)(x+1)", "x^{2}-1", "-1+x^2"), ("x^2+1", "(x-1)^2")),
        ("(a+b)^2", ("a^2+2ab+b^2", "(b+a)^2"), ("a^2+b^2", "(a-b)^2")),
        ("3x+6", ("3(x+2)", "6+3x", "3 x + 6"), ("3x+2", "x+2")),
        ("\\frac{x}{2}", ("\\frac12 x", "0.5x", "x/2"), ("\\frac{2}{x}", "2x")),
        ("y=2x+1", ("2x+1", "y = 1+2x", "2x - y + 1 = 0"), ("y=2x-1", "x=2y+1")),
        ("x=5", ("5", "x = 5"), ("x=-5", "6")),
        ("x\\geq 3", ("x \\ge 3", "3\\leq x", "[3,\\infty)"), ("x>3", "x\\leq 3")),
        ("\\sin^2 x", ("\\sin^2(x)", "1-\\cos^2 x", "(\\sin x)^2"), ("\\cos^2 x", "\\sin x^2")),
        ("n(n+1)/2", ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"), ("n(n-1)/2", "n^2")),
        ("6xy", ("6yx", "6 x y", "2x\\cdot 3y"), ("6x+y", "6")),
        ("x^{-1}", ("\\frac{1}{x}", "1/x"), ("-x", "x")),
        ("|x|", ("\\left|x\\right|", "\\sqrt{x^2}"), ("x", "-x")),
    ):
        yield from (Row("algebra", gold, answer, True) for answer in (gold, *rights))
        yield from (Row("algebra", gold, answer, False) for answer in wrongs)


def _collections() -> Iterator[Row]:
    for gold, rights, wrongs in (
        (
            "(1,2)",
            ("(1, 2)", "\\left(1,2\\right)", "(1.0,2.0)", "(\\frac{2}{2},2)"),
            ("(2,1)", "(1,3)", "1,2,3", "(1,2,3)"),
        ),
        ("(0,1]", ("\\left(0,1\\right]", "(0, 1]"), ("[0,1]", "(0,1)", "(0,2]")),
        ("[-1,\\infty)", ("\\left[-1,\\infty\\right)", "[-1, \\infty)"), ("(-1,\\infty)", "[-1,1)")),
        ("(-\\infty,0)\\cup(1,2)", ("(1,2)\\cup(-\\infty,0)",), ("(-\\infty,0)", "(0,1)\\cup(1,2)")),
        (
            "\\{1,2,3\\}",
            ("\\{3,2,1\\}", "\\left\\{1, 2, 3\\right\\}", "\\{1,2,2+1\\}"),
            ("\\{1,2\\}", "\\{1,2,4\\}"),
        ),
        ("1,2,3", ("1, 2, 3", "3,2,1", "1, 2, \\text{ and } 3"), ("1,2", "1,2,4")),
        ("2 \\text{ or } 3", ("2, 3", "2 or 3", "3\\text{ or }2"), ("2", "23")),
        ("\\pm 2", ("2,-2", "-2, 2", "\\pm2"), ("2", "\\pm 3")),
        (
            "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
            ("\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}", "\\begin{pmatrix}1 & 2\\\\ 3 & 4\\end{pmatrix}"),
            ("\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}"),
        ),
        ("\\emptyset", ("\\varnothing", "\\{\\}"), ("0", "\\{0\\}")),
        (
            "(3,\\frac{\\pi}{2})",
            ("(3, \\pi/2)", "\\left(3,\\frac{\\pi}{2}\\right)", "(3,0.5\\pi)"),
            ("(\\frac{\\pi}{2},3)", "(3,\\pi)"),
        ),
    ):
        yield from (Row("collection", gold, answer, True) for answer in (gold, *rights))
        yield from (Row("collection", gold, answer, False) for answer in wrongs)


def _texts() -> Iterator[Row]:
    for gold, rights, wrongs in (
        (
            "\\text{Evelyn}",
            ("Evelyn", "\\text{evelyn}", "\\mathrm{Evelyn}", "\\textbf{Evelyn}"),
            ("\\text{Briana}", "E"),
        ),
        ("\\text{even}", ("even", "\\text{ even}"), ("odd", "\\text{odd}")),
        ("\\text{(C)}", ("(C)", "C", "\\text{C}", "\\text{(c)}"), ("(B)", "\\text{D}")),
        ("B", ("\\text{B}", "(B)", "\\mathbf{B}"), ("A", "8")),
        ("\\text{east}", ("east", "\\text{East}"), ("west", "\\text{west}")),
        ("10101_2", ("10101_{2}", "10101_2"), ("10101_3", "10100_2")),
        ("7:30", ("7:30",), ("7:31", "8:30")),
        ("2:3", ("2 : 3", "2:3"), ("3:2", "2:4")),
    ):
        yield from (Row("text", gold, answer, True) for answer in (gold, *rights))
        yield from (Row("text", gold, answer, False) for answer in wrongs)


def rows() -> list[Row]:
    """The table, each line once."""
    parts = (
        *(_integers(), _fractions(), _mixed_numbers(), _percentages_and_units(), _roots_and_constants()),
        *(_algebra(), _collections(), _texts()),
    )
    return list(dict.fromkeys(row for part in parts for row in part))
