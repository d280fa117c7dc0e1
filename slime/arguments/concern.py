"""A concern: its flags, what follows from them, which of them cannot be, and what they point to.

    CONCERN = Concern({"loss": LossArgs}, derived=DerivedLoss, derive=derive)

The module of a concern ends with such a line, and ``registry`` lists them.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from slime.arguments.flags import Flag, flags_of, option_string

Rule = Callable[[Namespace], Iterator[str]]
"""Yields what is wrong, one line each, in the order in which to say it."""


def _derive_nothing(args: Namespace) -> None:
    pass


def _find_nothing(args: Namespace) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True)
class Concern:
    """What there is to know about one concern of a run before it starts.

    Attributes:
        flags: the dataclasses that declare them, by the heading they have in ``--help``.
        derived: a dataclass of the names that ``derive`` adds to ``args``, and of flags that are never None
            after it.
        derive: writes to ``args``; raises UsageError where it cannot go on.
        positive: flags that are above 0 if they have a value.
        not_negative: flags that are 0 or more if they have a value.
        contradictions: flags that do not fit together, or that would have no effect.
        missing: places on disk that are not there or cannot be written; only looks at names.
        unusable: what is there but of no use; imports and reads, which may take seconds.
    """

    flags: Mapping[str, type]
    derived: type | None = None
    derive: Callable[[Namespace], None] = _derive_nothing
    positive: tuple[str, ...] = ()
    not_negative: tuple[str, ...] = ()
    contradictions: Rule = _find_nothing
    missing: Rule = _find_nothing
    unusable: Rule = _find_nothing

    def specs(self) -> Iterator[Flag]:
        """Its flags, in order."""
        for declaration in self.flags.values():
            yield from flags_of(declaration)

    def bad_counts(self, args: Namespace) -> Iterator[str]:
        """Values out of the range of ``positive`` and ``not_negative``."""
        for names, lowest, wanted in (
            (self.positive, 0, "more than 0"),
            (self.not_negative, -1, "0 or more"),
        ):
            for name in names:
                value = getattr(args, name)
                if value is not None and value <= lowest:
                    yield f"{option_string(name)} {value}: wanted {wanted}"
