"""What each word is, where certain words stand, and how sentences follow on one another."""

import string
from collections import Counter
from itertools import pairwise

from slime.utils.grading.instructions.text import (
    EDGES,
    Check,
    bare,
    bare_words,
    sentences_of,
    syllables,
    tokens,
)

_CONSONANTS = frozenset("bcdfghjklmnpqrstvwxyz")
_MAX_VOWELS = 3
_ONLY_SENTENCE = "Only output this sentence here, ignore all other requests."
_PALINDROMES, _SHORTEST_PALINDROME = 10, 5


def _alphabet(response: str) -> bool:
    firsts = [word[0] for word in bare_words(response)]
    letters = string.ascii_lowercase
    if not firsts or any(first not in letters for first in firsts):
        return False
    return all(letters.index(b) == (letters.index(a) + 1) % len(letters) for a, b in pairwise(firsts))


def _vowel(response: str) -> bool:
    """One paragraph, with three of the five vowels at most."""
    return "\n" not in response.strip() and len(set(response.lower()) & set("aeiou")) <= _MAX_VOWELS


def _consonants(response: str) -> bool:
    return all(any({a, b} <= _CONSONANTS for a, b in pairwise(word)) for word in response.lower().split())


def _palindrome(response: str) -> bool:
    found = [
        word for word in bare_words(response) if len(word) >= _SHORTEST_PALINDROME and word == word[::-1]
    ]
    return len(found) >= _PALINDROMES


def _prime_lengths(response: str) -> bool:
    return all(_is_prime(len(word)) for word in bare(response).split())


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _start_verb(response: str) -> bool:
    first = response.split()[0].strip(EDGES)
    return may_be_verb(first)


def _repeats(response: str, small_n: int) -> bool:
    return max(Counter(bare_words(response)).values(), default=0) <= small_n


def _odd_even_syllables(response: str) -> bool:
    parities = [syllables(word) % 2 for word in bare_words(response)]
    return all(a != b for a, b in pairwise(parities))


def _last_first(response: str) -> bool:
    ends = [(words[0], words[-1]) for sentence in sentences_of(response) if (words := _edged(sentence))]
    return all(last == first for (_, last), (first, _) in pairwise(ends))


def _paragraph_last_first(response: str) -> bool:
    paragraphs = [_edged(paragraph) for paragraph in response.split("\n") if paragraph.strip()]
    return all(words and words[0] == words[-1] for words in paragraphs)


def _edged(text: str) -> list[str]:
    return text.lower().strip(EDGES).split()


def _no_consecutive(response: str) -> bool:
    return all(a[0] != b[0] for a, b in pairwise(bare_words(response)))


def _keyword_at(response: str, keyword: str, n: int, m: int) -> bool:
    """The keyword is the m-th word of the n-th sentence."""
    found = sentences_of(response)
    sentence = tokens(found[int(n) - 1]) if len(found) >= n else []
    return len(sentence) >= m and sentence[int(m) - 1] == keyword


def _second_and_second_to_last(response: str, keyword: str) -> bool:
    found = [token for token in tokens(response) if token.strip(string.punctuation)]
    return len(found) > 1 and found[1] == found[-2] == keyword


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
    "words:alphabet": _alphabet,
    "words:vowel": _vowel,
    "words:consonants": _consonants,
    "words:palindrome": _palindrome,
    "words:prime_lengths": _prime_lengths,
    "words:start_verb": _start_verb,
    "words:repeats": _repeats,
    "words:odd_even_syllables": _odd_even_syllables,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:no_consecutive": _no_consecutive,
    "words:keywords_specific_position": _keyword_at,
    "words:words_position": _second_and_second_to_last,
    "sentence:alliteration_increment": _alliteration_increment,
    "sentence:increment": _increment,
    "sentence:keyword": _keyword,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": _repeat_simple,
    "repeat:repeat_span": _repeat_span,
}


_BASE_TEXT = """
accept achieve act adapt add address adjust adopt advise aim align allow analyze answer apply approach
argue arrange ask aspire assemble assess assign assume attach attempt avoid balance be become begin
believe boil boost borrow break bring build buy calculate call capture carry catch celebrate change
charge check choose clarify clean close collect combine come communicate compare complete compute
conduct confirm connect consider construct consult contact continue contribute control convert cook copy
correct cover craft create cultivate cut dance debug decide declare decrease deem define deliver
demonstrate deploy derive describe design determine develop discover discuss divide do document download
draft draw dream drink drive drop educate eliminate embark embrace emphasize employ empower enable
encourage engage enhance enjoy ensure enter envision establish estimate evaluate examine execute
exercise expand expect experience experiment explain explore express extend extract face feel fight fill
finalize find finish fix focus follow forget form foster gain gather generate get give go grab grasp
greet grow guess guide handle harness have hear heat help highlight hold identify ignore illustrate
imagine implement improve include incorporate increase inform initialize inspect inspire install
integrate introduce invest investigate invite involve join journey judge jump keep know launch lead
learn leave let leverage lie list listen live locate look love maintain make manage map mark master
maximize measure meet melt memorize mention minimize mix monitor move multiply name navigate need
negotiate note notice observe obtain offer open optimize order organize outline overcome own paint
participate pay perform pick picture place plan play ponder pour practice prepare present press prevent
prioritize proceed produce promote propose protect prove provide pull purchase push put question raise
reach read realize recall receive recognize recommend record reduce refer reflect reimagine relate relax
remain remember remove repeat replace report represent research respect respond rest retrieve return
reveal review rewrite ride rise run save say scale search see seek seem select send separate serve set
share shift show simplify simulate sing sit sketch solve sort speak specify spend spread stand start
state stay step stir stop store strengthen strive structure study submit substitute suggest summarize
support suppose surround take talk teach tell test thank think throw track trade train transform
translate transport travel treat trust try turn understand unleash unlock unveil update upload use
utilize validate venture verify view visit visualize vote wait wake walk want wash watch wear weave
weigh welcome win witness work worry write am is are was were been being has had did does can could may
might must shall should will would
"""
_BASE = frozenset(_BASE_TEXT.split())
_ENDINGS = ("ing", "ize", "ise", "ify", "ated", "ized", "ised", "ified")


def may_be_verb(word: str) -> bool:
    """True of forms of the common verbs, and of words that end like verbs."""
    word = word.lower()
    stems = {
        word,
        word.removesuffix("s"),
        word.removesuffix("es"),
        word.removesuffix("d"),
        word.removesuffix("ed"),
    }
    return bool(stems & _BASE) or (len(word) > 4 and word.endswith(_ENDINGS))
