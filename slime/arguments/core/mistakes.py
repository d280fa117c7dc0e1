"""All mistakes of a command line, without those that only follow from another one.

A flag whose value cannot be used is taken off ``args`` (`forget`). A rule that reads it ends there. A message
that names a flag which an earlier message is about is left out, since that flag is going to be another one.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterable

from slime.arguments.core.errors import NotKnownError, UsageError
from slime.arguments.core.group import ConfigGroup
from slime.arguments.core.run_args import forget

_FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w-]*")


class Mistakes:
    """What is wrong with a command line, as far as it has been looked at."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._subjects: set[str] = set()

    def add(self, *messages: str) -> None:
        """Adds messages that do not follow from one another; each begins with the flags that it is about."""
        new = [
            message
            for message in dict.fromkeys(messages)
            if message not in self.messages and not self._subjects & set(_FLAG.findall(message))
        ]
        self.messages += new
        for message in new:
            self._subjects |= set(_FLAG.findall(message.partition(": ")[0]))

    def excuse(self, flags: Iterable[str]) -> None:
        """Leaves out what is said about these flags, which nobody knows."""
        self._subjects |= set(flags)

    def try_to(self, act: Callable[[], object]) -> tuple[str, ...] | None:
        """Acts, and adds what is wrong; returns the names that have no value now, None if nobody knows them.

        Raises:
            Exception: of ``act``, a fault of ours unless it takes for granted what was refused before.
        """
        try:
            act()
        except NotKnownError:
            return None
        except UsageError as error:
            self.add(*error.messages)
            return error.unknown
        except OSError as error:  # a place that cannot be looked at: no permission, a broken file system
            self.add(f"{error.filename}: {error.strerror}" if error.filename else str(error))
            return None
        except Exception:
            if not self.messages:
                raise
            return None
        return ()

    def of_rule(self, rule: Callable[[Namespace], Iterable[str]], args: Namespace) -> None:
        """Adds what a rule yields, one message at a time: a later one may follow from an earlier one."""

        def ask() -> None:
            for message in rule(args):
                self.add(message)

        self.try_to(ask)

    def of_contents(self, rule: Callable[[Namespace], Iterable[str]], args: Namespace) -> None:
        """Adds as `of_rule` does; other rules do not read what is of no use, as prompts with a tokenizer."""
        self.of_rule(rule, args)
        forget(args, [flag.removeprefix("--").replace("-", "_") for flag in self._subjects])

    def of_derivation(self, group: ConfigGroup, args: Namespace) -> None:
        """Lets a config group fill in ``args``; what it could not fill in is not known to any rule."""
        unknown = self.try_to(lambda: group.derive(args))
        if unknown is None:
            unknown = tuple(group.completed_names())
        forget(args, unknown)

    def end(self) -> None:
        """Raises UsageError with all of them, if there are any."""
        if self.messages:
            raise UsageError(*self.messages)
