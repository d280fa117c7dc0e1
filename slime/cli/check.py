"""``slime check``: whether a run would start and what it would need, without starting it."""

from collections.abc import Sequence

from slime.cli import train


def run(words: Sequence[str]) -> int:
    """Prints the page of ``--check``; the process ends with it."""
    return train.run([*words, "--check"])
