"""How many words, numbers, names there are, and which share of the text they make up."""

import re

from slime.utils.grading.instructions.text import EDGES, Check, bare, bare_words, sentences_of

_CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
_PRONOUNS_TEXT = """
i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she
her hers herself it its itself they them their theirs themselves
"""
_PRONOUNS = frozenset(_PRONOUNS_TEXT.split())
_NAMES_TEXT = """
Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia
Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett
Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria
Joseph Claire Ryan Stella Jonathan
"""
_NAMES = _NAMES_TEXT.split()
_STOP_WORDS_TEXT = """
i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers
herself it its itself they them their theirs themselves what which who whom this that these those am is
are was were be been being have has had having do does did doing a an the and but if or because as until
while of at by for with about against between into through during before after above below to from up
down in out on off over under again further then once here there when where why how all any both each
few more most other some such no nor not only own same so than too very s t can will just don should now
d ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn
weren won wouldn
"""
_STOP_WORDS = frozenset(_STOP_WORDS_TEXT.split())
_TIMES = (1, 2, 3, 5, 7)
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_TOLERANCE = 2


def _word_count_range(response: str, min_words: int, max_words: int) -> bool:
    return min_words <= len(re.findall(r"\w+", response)) <= max_words


def _unique_words(response: str, N: int) -> bool:
    return len({word.strip(EDGES) for word in response.lower().split()}) >= N


def _conjunctions(response: str, small_n: int) -> bool:
    return len(_CONJUNCTIONS & {word.strip(EDGES) for word in response.lower().split()}) >= small_n


def _person_names(response: str, N: int) -> bool:
    return sum(name in response for name in _NAMES) >= N


def _numbers(response: str, N: int) -> bool:
    return len(re.findall(r"\d+", bare(response))) == N


def _pronouns(response: str, N: int) -> bool:
    return sum(word in _PRONOUNS for word in bare_words(response.replace("/", " "))) >= N


def _punctuation(response: str) -> bool:
    """All of . , ! ? ; : besides an interrobang."""
    interrobang = next((mark for mark in ("?!", "!?", "‽") if mark in response), None)
    return interrobang is not None and set(".,!?;:") <= set(response.replace(interrobang, "", 1))


def _keywords_multiple(
    response: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    text = response.lower()
    keywords = (keyword1, keyword2, keyword3, keyword4, keyword5)
    return all(text.count(word.lower()) == times for word, times in zip(keywords, _TIMES, strict=True))


def _words_japanese(response: str, N: int) -> bool:
    every = [word.strip(EDGES) for word in response.split()][int(N) - 1 :: int(N)]
    return all(_JAPANESE.search(word) for word in every if word and not word.isdigit())


def _stop_words(response: str, percentage: float) -> bool:
    found = re.findall(r"\w+", response.lower())
    return bool(found) and 100 * sum(word in _STOP_WORDS for word in found) / len(found) <= percentage


def _ends(response: str) -> dict[str, int]:
    found = sentences_of(response)
    return {mark: sum(sentence.endswith(mark) for sentence in found) for mark in ".?!"}


def _sentence_type(response: str) -> bool:
    ends = _ends(response)
    return ends["."] == 2 * ends["?"]


def _sentence_balance(response: str) -> bool:
    return len(set(_ends(response).values())) == 1


def _overlap(response: str, reference_text: str, percentage: float) -> bool:
    """Computes which share of the trigrams of characters in the response is in the reference."""
    own, other = _trigrams(response), _trigrams(reference_text)
    return bool(own) and abs(100 * len(own & other) / len(own) - percentage) <= _TOLERANCE


def _trigrams(text: str) -> set[str]:
    return {text[start : start + 3] for start in range(len(text) - 2)}


def _sentence_words(response: str) -> bool:
    """Three sentences of one length, and no word in two of them."""
    found = sentences_of(response)
    every = [set(bare_words(sentence)) for sentence in found]
    different = sum(map(len, every)) == len(set().union(*every))
    return len(found) == 3 and len(set(map(len, found))) == 1 and different


CHECKS: dict[str, Check] = {
    "count:word_count_range": _word_count_range,
    "count:unique_word_count": _unique_words,
    "count:conjunctions": _conjunctions,
    "count:person_names": _person_names,
    "count:numbers": _numbers,
    "count:pronouns": _pronouns,
    "count:punctuation": _punctuation,
    "count:keywords_multiple": _keywords_multiple,
    "count:words_japanese": _words_japanese,
    "ratio:stop_words": _stop_words,
    "ratio:sentence_type": _sentence_type,
    "ratio:sentence_balance": _sentence_balance,
    "ratio:overlap": _overlap,
    "ratio:sentence_words": _sentence_words,
}
