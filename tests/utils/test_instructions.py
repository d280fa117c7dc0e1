"""Each instruction has a response that follows it and one that just does not."""

import string
import time

import pytest

from slime.utils.grading.instructions import CHECKS, LabelError, follows_all
from slime.utils.grading.instructions.tasks import _CAPITALS
from slime.utils.grading.instructions.text import sentences_of, syllables
from tests.each import hold_each

NAMES = "Emma, Liam and Sophia met Noah"
PALINDROMES = "level radar civic rotor kayak refer madam tenet stats solos"
ALPHABET = " ".join(f"{letter.upper()}bc is here." for letter in string.ascii_lowercase)
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{i},France,Paris,2000,3" for i in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f'{i},Toys,"A&B",3,4' for i in range(14))
GRADES = "\n".join(
    "\t".join(f'"{cell}"' for cell in row)
    for row in (["StudentID", "Subject", "Grade", "Semester", "Score"], *[list("12345")] * 3)
)
QUESTIONS = "\n\n".join(
    f"Question {i + 1}: Who{' really' * i} painted it?\n" + "\n".join(f"{x}) one" for x in "ABCDE")
    for i in range(4)
)
AFRICA = "\n".join(["Zimbabwe", "Zambia", *sorted((f"Country {i:02}" for i in range(50)), reverse=True)])

CASES = [
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "one two three", "one two three four"),
    ("count:unique_word_count", {"N": 3}, "one two three three", "one two two Two."),
    ("count:conjunctions", {"small_n": 2}, "this and that, but not so", "this and that and those"),
    ("count:person_names", {"N": 4}, NAMES, NAMES.replace("Noah", "Bob")),
    ("count:numbers", {"N": 2}, "1 and 23", "1, 2 and 3"),
    ("count:pronouns", {"N": 3}, "I gave him his", "I gave Tom the book"),
    ("count:punctuation", {}, "a. b, c! d? e; f: g?!", "a. b, c! d? e; f: g"),
    (
        "count:keywords_multiple",
        {f"keyword{i}": word for i, word in enumerate("vwxyz", 1)},
        "v ww xxx yyyyy zzzzzzz",
        "v w xxx yyyyy zzzzzzz",
    ),
    ("count:words_japanese", {"N": 3}, "one two 三 four five 六", "one two three"),
    ("ratio:stop_words", {"percentage": 50}, "the cat", "the cat is in the house"),
    ("ratio:sentence_type", {}, "A is. B is. Is C?", "A is. Is C?"),
    ("ratio:sentence_balance", {}, "A is. B? C!", "A is. B is. C?"),
    ("ratio:overlap", {"reference_text": "abcd", "percentage": 50}, "abcx", "abcd"),
    ("ratio:sentence_words", {}, "One cat. Two dog. Six ant.", "One cat. Two cat. Six ant."),
    ("words:alphabet", {}, "Yes, zebras are big", "Yes, zebras can"),
    ("words:vowel", {}, "a big odd cat", "a big odd blue cat"),
    ("words:consonants", {}, "Thick branch", "Thick tree top"),
    ("words:palindrome", {}, PALINDROMES, PALINDROMES.replace("solos", "mum")),
    ("words:prime_lengths", {}, "an ant flies", "an ant fly away"),
    ("words:start_verb", {}, "Consider this.", "The cat."),
    ("words:repeats", {"small_n": 2}, "a b a B", "a b A a"),
    ("words:odd_even_syllables", {}, "cat water dog", "cat dog"),
    ("words:last_first", {}, "I like tea. Tea likes me.", "I like tea. It likes me."),
    ("words:paragraph_last_first", {}, "Tea is tea.\n\nI am I", "Tea is hot."),
    ("words:no_consecutive", {}, "a big cat", "a big bear"),
    (
        "words:keywords_specific_position",
        {"keyword": "tea", "n": 2, "m": 3},
        "Yes. I like tea.",
        "I like tea. Yes.",
    ),
    ("words:words_position", {"keyword": "tea"}, "My tea is the tea now.", "My tea is the coffee now."),
    (
        "sentence:alliteration_increment",
        {},
        "I see. Big bears run. Six silly sausages sing.",
        "Big bears run. I see.",
    ),
    ("sentence:increment", {"small_n": 2}, "I am. I am so sad.", "I am. I am sad."),
    ("sentence:keyword", {"word": "tea", "N": 2}, "Yes. I like Tea.", "Tea is good. Yes."),
    ("repeat:repeat_change", {"prompt_to_repeat": "Write a poem"}, "Compose a poem", "Write a poem"),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Ok."),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2}, "b c", "b c d"),
    ("format:parentheses", {}, "(a [b {c (d [e]) }])", "(a [b {c (d)}])"),
    ("format:quotes", {}, '"a \'b "c" d\' e"', "\"a 'b' it's c\""),
    ("format:options", {"options": "yes/no/maybe"}, "Maybe.", "Maybe not"),
    ("format:options", {"options": "I know or I don't know"}, "I don't know.", "I do know"),
    ("format:options", {"options": "a), b), c), d)"}, "b)", "b"),
    ("format:newline", {}, "one\ntwo\n\nthree", "one two\nthree"),
    ("format:emoji", {}, "Yes 😀. No! 🎉", "Yes 😀. No!"),
    ("format:line_indent", {}, "a\n b\n\n  c", "a\n b\n b"),
    ("format:quote_unquote", {}, '"a" means b.', 'b is "a".'),
    ("format:list", {"sep": "!?!?"}, "!?!? a\n!?!? b", "!?!? a"),
    ("format:thesis", {}, "<i>It is so.</i> Because.", "<i></i> Because."),
    ("format:sub-bullets", {}, "* a\n - b\n* c\n - d", "* a\n - b\n* c"),
    ("format:no_bullets_bullets", {}, "One is. Two is.\n* a\n* b", "One is.\n* a\n* b"),
    ("format:title_case", {}, "The Cat of the House", "The cat of the House"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a"),
    ("format:no_whitespace", {}, "yes", "yes no"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
    ("custom:mcq_count_length", {}, QUESTIONS, QUESTIONS.replace(" really really really", "")),
    ("custom:reverse_newline", {}, AFRICA, AFRICA.replace("Country 20", "Country 99")),
    ("custom:word_reverse", {}, "eagle bald the is symbol The", "The symbol is the bald eagle"),
    ("custom:character_reverse", {}, "elgae dlab ehT", "bald eagle"),
    ("custom:sentence_alphabet", {}, ALPHABET, ALPHABET.replace("Zbc", "Abc")),
    ("custom:european_capitals_sort", {}, ", ".join(_CAPITALS), ", ".join(_CAPITALS[1:])),
    ("custom:csv_city", {}, CITIES, CITIES + "\n8,France,Paris,2000,3"),
    ("custom:csv_special_character", {}, PRODUCTS, PRODUCTS.replace("&", "")),
    ("custom:csv_quotes", {}, GRADES, GRADES.replace('"1"', "1")),
    ("custom:date_format_list", {}, "1796-04-12, 1805-12-02", "1796-04-31"),
]


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_a_response_that_follows_is_told_from_one_that_does_not(name, arguments, good, bad):
    assert follows_all(good, [name], [{**arguments, "unused": None}])
    assert not follows_all(bad, [name], [arguments])
    assert not follows_all("  ", [name], [arguments])


def test_every_instruction_has_a_case_and_there_are_58():
    assert {name for name, *_ in CASES} == set(CHECKS)
    assert len(CHECKS) == 58


def test_all_instructions_must_be_followed():
    names, arguments = ["format:no_whitespace", "count:numbers"], [{}, {"N": 1}]
    assert follows_all("a1", names, arguments)
    assert not follows_all("a12b3", names, arguments)


@pytest.mark.parametrize(
    ("names", "arguments", "why"),
    [
        (["count:nothing"], [{}], r"instructions \['count:nothing'\]: unknown"),
        (["count:numbers"], [{}], "instruction count:numbers with .*missing"),
        (["count:numbers"], [{"N": 1}, {}], "1 instructions with arguments for 2"),
    ],
)
def test_a_bad_instruction_is_the_labels_fault(names, arguments, why):
    with pytest.raises(LabelError, match=why):
        follows_all("a", names, arguments)


def test_sentences_end_at_their_marks_but_not_at_titles():
    text = 'Dr. Smith left. "Why?" he said!\nJ. Doe knew.'
    assert sentences_of(text) == ["Dr. Smith left.", '"Why?"'[:5], "he said!", "J. Doe knew."]


@pytest.mark.parametrize(
    ("word", "count"),
    [("cat", 1), ("water", 2), ("make", 1), ("banana", 3), ("table", 2), ("jumped", 1), ("wanted", 2)],
)
def test_syllables(word, count):
    assert syllables(word) == count


# More digits than Python reads as a number, what is no table, and rows of what might be tried in every way.
STRANGE = (
    *("9" * 5000, "a\rb", '"', "\0", "٣" * 5000, "x" * 140_000, "1796-04-1２", "a," * 60_000),
    *(part * 10_000 for part in ("<i>", "<i>a</i", "<em><i>", "'w", "e", "* -", "a. ", '!"', "Question\n")),
)


def test_any_text_has_a_verdict_in_linear_time():
    def check(case: tuple[str, dict[str, object]]) -> None:
        for text in STRANGE:
            start = time.process_time()
            assert follows_all(text, [case[0]], [case[1]]) in (True, False)
            assert time.process_time() - start < 2, text[:10]

    hold_each([(name, arguments) for name, arguments, *_ in CASES], check)


@pytest.mark.parametrize(
    ("response", "follows"),
    [
        ("<em>a</i> b</em> c", True),
        ("<i> <em>a</em></I>", False),
        ("<i>a <em>b</em> c", True),
        ("</i><i>a", False),
    ],
)
def test_italics_end_with_their_own_tag(response, follows):
    assert follows_all(response, ["format:thesis"], [{}]) is follows
