"""Instructions that are a task of their own, with one right form of answer."""

import csv
import io
import re
import unicodedata
from datetime import date
from itertools import pairwise
from typing import Literal

from slime.utils.grading.instructions.text import EDGES, Check, bare_words, sentences_of

_NAPOLEON = range(1769, 1822)
_CAPITALS_TEXT = """
Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam
Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana
Zagreb
"""
_CAPITALS = _CAPITALS_TEXT.split()
"""North of 45 degrees, from north to south; Kyiv is not in IFBench's list."""
_AFRICAN_COUNTRIES = 52
_MAX_DIGITS = 20
_QUESTION = re.compile(r"^Question\b", re.MULTILINE)
_OPTION = re.compile(r"^\s*[A-Ea-e][.):|]\s*\w")


def _multiples(response: str) -> bool:
    found = re.findall(r"\d+", response)
    # Python reads no number of thousands of digits.
    short = all(len(number) <= _MAX_DIGITS for number in found)
    return short and [int(number) for number in found] == list(range(14, 51, 7))


def _questions(response: str) -> bool:
    """Four questions of five options, each question longer than the one before."""
    starts = [match.start() for match in _QUESTION.finditer(response)]
    if len(starts) != 4 or starts[0] != 0:
        return False
    lengths = []
    for start, end in pairwise([*starts, len(response)]):
        lines = [line.strip() for line in response[start:end].split("\n") if line.strip()]
        options = [line for line in lines if _OPTION.match(line)]
        if len(options) != 5:
            return False
        text = " ".join(lines[: lines.index(options[0])])
        lengths.append(len(re.sub(r"^Question\s*\d*[.:|);]*\s*", "", text)))
    return all(a < b for a, b in pairwise(lengths))


def _countries_backwards(response: str) -> bool:
    lines = [_ascii(line.strip(EDGES)) for line in response.split("\n") if line.strip(EDGES)]
    start = next((place for place, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    return len(lines) - start >= _AFRICAN_COUNTRIES and lines[start:] == sorted(lines[start:], reverse=True)


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _words_backwards(response: str) -> bool:
    """A single sentence that speaks of the bald eagle when read from its end."""
    return "bald eagle" in " ".join(reversed(bare_words(response))) and len(sentences_of(response)) == 1


def _letters_backwards(response: str) -> bool:
    return "elgae dlab" in response.lower()


def _sentence_alphabet(response: str) -> bool:
    firsts = [sentence.strip(EDGES)[:1].lower() for sentence in sentences_of(response)]
    return "".join(firsts) == "abcdefghijklmnopqrstuvwxyz"


def _capitals(response: str) -> bool:
    return [name.strip() for name in _ascii(response).split(",") if name.strip()] == _CAPITALS


def _rows(response: str, delimiter: str = ",", keep_quotes: bool = False) -> list[list[str]]:
    """One row without fields of what is no table at all."""
    quoting: Literal[0, 3] = csv.QUOTE_NONE if keep_quotes else csv.QUOTE_MINIMAL
    reader = csv.reader(
        io.StringIO(response.strip()), delimiter=delimiter, quoting=quoting, skipinitialspace=True
    )
    try:
        return [[field.strip() for field in row] for row in reader]
    except csv.Error:
        return [[]]


def _csv_city(response: str) -> bool:
    header, *rows = _rows(response)
    return header == ["ID", "Country", "City", "Year", "Count"] and list(map(len, rows)) == [5] * 7


def _csv_special_character(response: str) -> bool:
    header, *rows = _rows(response)
    quoted = re.findall(r'"([^"\n]*)"', response.partition("\n")[2])
    shape = (
        header == ["ProductID", "Category", "Brand", "Price", "Stock"] and list(map(len, rows)) == [5] * 14
    )
    return shape and any(re.search(r"[^\w\s]", field) for field in quoted)


def _csv_quotes(response: str) -> bool:
    rows = _rows(response, "\t", keep_quotes=True)
    header = [name.strip('"') for name in rows[0]]
    quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for row in rows for field in row)
    return header == ["StudentID", "Subject", "Grade", "Semester", "Score"] and (
        quoted and list(map(len, rows)) == [5] * 4
    )


def _dates(response: str) -> bool:
    return all(_is_of_napoleon(text.strip()) for text in response.strip().split(","))


def _is_of_napoleon(text: str) -> bool:
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        return False
    try:
        return date.fromisoformat(text).year in _NAPOLEON
    except ValueError:
        return False


CHECKS: dict[str, Check] = {
    "custom:multiples": _multiples,
    "custom:mcq_count_length": _questions,
    "custom:reverse_newline": _countries_backwards,
    "custom:word_reverse": _words_backwards,
    "custom:character_reverse": _letters_backwards,
    "custom:sentence_alphabet": _sentence_alphabet,
    "custom:european_capitals_sort": _capitals,
    "custom:csv_city": _csv_city,
    "custom:csv_special_character": _csv_special_character,
    "custom:csv_quotes": _csv_quotes,
    "custom:date_format_list": _dates,
}
