"""What refuses a command line, flag by flag."""

import re

from slime.arguments import UsageError, validated_args


def reasons(words: list[str]) -> list[str]:
    """What refuses a command line; flags that are refused by name are left out of the next try."""
    found: list[str] = []
    while True:
        try:
            validated_args(words)
        except UsageError as error:
            new = [message for message in map(_short, error.messages) if message not in found]
            found += new
            named = [_flag(message) for message in error.messages if "config.json" not in message]
            refused = [flag for flag in named if flag in words]
            if not new or not refused:
                return found
            for flag in refused:
                words = _without(words, flag)
        else:
            return found


def _flag(message: str) -> str:
    return message.split()[0].strip(":")


def _short(message: str) -> str:
    """The message without the place of the checkpoint and without what is wanted."""
    message = re.sub(r"^--hf-checkpoint \S+: \S+/config.json: ", "", message)
    message = re.sub(r"^/\S+: ", "", re.sub(r" /\S+:", ":", message))
    return message.partition(" (wanted")[0]


def _without(words: list[str], flag: str) -> list[str]:
    start = words.index(flag)
    rest = range(start + 1, len(words))
    end = next((place for place in rest if words[place].startswith("--")), len(words))
    return words[:start] + words[end:]
