"""Words, sentences and what they are made of, in plain English text."""

import re
import string
from collections.abc import Callable

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_END = re.compile(r"(?<=[.!?])[\"')\]”’]*\s+(?=[^\s])")
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|Inc|Ltd|Co)|\b[A-Z])\.$")
_EMOJI = re.compile("[\U0001f000-\U0001faff☀-➿⌀-⏿⬀-⯿\U0001f1e6-\U0001f1ff‼⁉™ℹ️⃣]")
_VOWEL_GROUP = re.compile(r"[aeiouy]+")
Check = Callable[..., bool]
EDGES = string.punctuation + string.whitespace


def bare(text: str) -> str:
    """Returns a text without ASCII punctuation."""
    return text.translate(_NO_PUNCTUATION)


def bare_words(text: str) -> list[str]:
    """Lower-case words without ASCII punctuation."""
    return bare(text.lower()).split()


def tokens(text: str) -> list[str]:
    """Words and marks, each by itself; an apostrophe stays in its word."""
    return re.findall(r"\w+(?:['’-]\w+)*|[^\w\s]", text)


def sentences_of(text: str) -> list[str]:
    """Sentences by the mark at their end; lines are joined, titles and initials end none."""
    found: list[str] = []
    for piece in _END.split(" ".join(text.split())):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += f" {piece}"
        elif piece:
            found.append(piece)
    return found


def is_emoji(character: str) -> bool:
    return _EMOJI.match(character) is not None


def syllables(word: str) -> int:
    """Counts the syllables of a word as its groups of vowels, a silent e at its end left out; at least 1."""
    word = re.sub(r"(?<=[^aeiouyl])e$|(?<=[aeiouy]l)e$", "", word.lower())
    word = re.sub(r"(?<=[^aeiouydt])ed$|(?<=[^aeiouyscxgz])es$", "", word)
    return max(1, len(_VOWEL_GROUP.findall(word)))
