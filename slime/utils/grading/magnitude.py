"""How large the numbers of a formula may become: an answer of ten characters can ask for all memory."""

import sympy

_MAX_BITS = 1 << 15
_LARGEST_EXPONENT = 1000
_FINEST_EXPONENT_BITS = 64
_HIGHEST_DEGREE = 64
"""The highest degree of a power of a sum, which sympy may multiply out."""
_HIGHEST_DEGREES = 256
"""The highest degrees of all such powers of a formula together."""
_LARGEST_FACTORIAL = 1000
_LARGEST_SHIFT = 100
"""Beside a symbol in a factorial, which sympy may turn into a product."""


class FormulaError(ValueError):
    """What was written is no formula, or one that would not be computed in any reasonable time."""


def check_power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    """The exponent, if the power stays within bounds.

    Raises:
        FormulaError: it would have thousands of digits or terms.
    """
    size = _largest(exponent)
    if size > _LARGEST_EXPONENT or _bits_below(exponent) > _FINEST_EXPONENT_BITS:
        raise FormulaError(f"exponent {exponent!s:.40} (wanted: up to {_LARGEST_EXPONENT})")
    if size * _bits(base) > _MAX_BITS:
        raise FormulaError(f"a power of more than {_MAX_BITS} bits")
    foundation, before = base.as_base_exp()
    if foundation.is_Add and size * _largest(before) > _HIGHEST_DEGREE:
        raise FormulaError(f"a sum to a power beyond {_HIGHEST_DEGREE}")
    return exponent


def check_degrees(expression: sympy.Expr) -> sympy.Expr:
    """The expression, if its powers of sums together can be multiplied out.

    Raises:
        FormulaError: they have too many terms.
    """
    powers = [power for power in expression.atoms(sympy.Pow) if power.base.is_Add]
    if (degrees := sum(_largest(power.exp) for power in powers)) > _HIGHEST_DEGREES:
        raise FormulaError(f"powers of sums of degree {degrees} together (wanted: up to {_HIGHEST_DEGREES})")
    return expression


def check_factorial(argument: sympy.Expr) -> sympy.Expr:
    """The argument of a factorial, if its value stays within bounds.

    Raises:
        FormulaError: it is too large.
    """
    most = _LARGEST_FACTORIAL if argument.is_Number else _LARGEST_SHIFT
    if _largest(argument) > most:
        raise FormulaError(f"factorial of {argument!s:.40} (wanted: up to {most})")
    return argument


def _largest(expression: sympy.Expr) -> float:
    """The largest number in it without its sign, infinity and what is no number left out."""
    numbers = [abs(number) for number in expression.atoms(sympy.Number) if number.is_finite]
    return max(numbers, default=0)


def _bits(expression: sympy.Expr) -> int:
    numbers = expression.atoms(sympy.Rational)
    return max((max(abs(int(n.p)), int(n.q)).bit_length() for n in numbers if n.is_finite), default=1)


def _bits_below(expression: sympy.Expr) -> int:
    return max((int(n.q).bit_length() for n in expression.atoms(sympy.Rational)), default=0)
