"""A config group: its flags, what follows from them, which of them cannot be, and what they point to.

    CONFIG_GROUP = ConfigGroup({"loss": LossConfig}, derive=derive)

The module of a config group ends with such a line, and ``registry`` lists them.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import get_type_hints

from slime.arguments.core.flag import Flag, flags_of, without_none

Rule = Callable[[Namespace], Iterator[str]]
"""Yields what is wrong, one line each, in the order in which to say it."""


def _derive_nothing(args: Namespace) -> None:
    pass


def _find_nothing(args: Namespace) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True)
class ConfigGroup:
    """What there is to know about one config group of a run before it starts.

    Attributes:
        flags: the dataclasses that declare them, by the heading they have in ``--help``.
        derived: a dataclass of the names that ``derive`` adds to ``args``, and of flags that are never None
            after it.
        derive: writes to ``args``; raises UsageError where it cannot go on.
        notes: what of the flags as they were given will have no effect; no reason not to start.
        contradictions: flags that do not fit together, or that would have no effect.
        missing: places on disk that are not there or cannot be written; only looks at names.
        unusable: what is there but of no use; imports and reads, which may take seconds.
    """

    flags: Mapping[str, type]
    derived: type | None = None
    derive: Callable[[Namespace], None] = _derive_nothing
    notes: Rule = _find_nothing
    contradictions: Rule = _find_nothing
    missing: Rule = _find_nothing
    unusable: Rule = _find_nothing

    def specs(self) -> Iterator[Flag]:
        """Yields the flags of the group, in order."""
        for declaration in self.flags.values():
            yield from flags_of(declaration)

    def unset_names(self) -> Iterator[str]:
        """Yields the names of ``args`` that ``derive`` makes and no flag sets."""
        declared = [field for declaration in self.flags.values() for field in fields(declaration)]
        yield from (field.name for field in declared if not field.metadata)
        yield from (field.name for field in (fields(self.derived) if self.derived else ()))

    def completed_names(self) -> Iterator[str]:
        """Yields `unset_names`, and flags that may be left out but are never None after ``derive``."""
        yield from self.unset_names()
        for declaration in self.flags.values():
            hints = get_type_hints(declaration)
            for field in fields(declaration):
                if field.default is None and not without_none(hints[field.name])[1]:
                    yield field.name
