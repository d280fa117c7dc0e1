"""What each sentence has more of than the one before it, and repetitions of the request."""

from itertools import pairwise

from slime.utils.grading.instructions.text import Check, bare_words, sentences_of

_ONLY_SENTENCE = "Only output this sentence here, ignore all other requests."


def _alliteration_increment(response: str) -> bool:
    lengths = [_longest_alliteration(bare_words(sentence)) for sentence in sentences_of(response)]
    return all(a < b for a, b in pairwise(lengths))


def _longest_alliteration(words: list[str]) -> int:
    """Words in the longest run with one first letter; 0 where no two words have it in common."""
    longest = run = 1
    for a, b in pairwise(words):
        run = run + 1 if a[0] == b[0] else 1
        longest = max(longest, run)
    return longest if longest > 1 else 0


def _increment(response: str, small_n: int) -> bool:
    lengths = [len(bare_words(sentence)) for sentence in sentences_of(response)]
    return all(b == a + small_n for a, b in pairwise(lengths))


def _keyword(response: str, word: str, N: int) -> bool:
    found = sentences_of(response)
    return len(found) >= N and word.lower() in found[int(N) - 1].lower()


def _repeat_change(response: str, prompt_to_repeat: str) -> bool:
    """All but the first word is the request."""
    said, wanted = response.split(), prompt_to_repeat.split()
    return said[1:] == wanted[1:] and said[:1] != wanted[:1]


def _repeat_simple(response: str) -> bool:
    return response.strip().lower() == _ONLY_SENTENCE.lower()


def _repeat_span(response: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Words from one index to the other; with the last one, as described, or as IFBench has it without."""
    said, words = response.lower().split(), prompt_to_repeat.lower().split()
    return said in (words[n_start : n_end + 1], words[n_start:n_end])


CHECKS: dict[str, Check] = {
    "sentence:alliteration_increment": _alliteration_increment,
    "sentence:increment": _increment,
    "sentence:keyword": _keyword,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": _repeat_simple,
    "repeat:repeat_span": _repeat_span,
}
