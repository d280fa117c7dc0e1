"""How the response is laid out."""

import re
import string
from itertools import pairwise

from slime.utils.grading.instructions.text import EDGES, Check, bare, is_emoji, sentences_of, tokens

_PAIRS = {")": "(", "]": "[", "}": "{"}
_DEEPEST_BRACKETS, _DEEPEST_QUOTES = 5, 3
_TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
_MINOR_TEXT = """
a an the and but or nor for so yet as at by in of off on per to up via with from into over than
"""
_MINOR = frozenset(_MINOR_TEXT.split())
_ITALICS = {
    tag: tuple(re.compile(f"<{slash}{tag}>", re.IGNORECASE) for slash in ("", "/")) for tag in ("i", "em")
}


def _parentheses(response: str) -> bool:
    """Brackets of any kind five deep, and the innermost closed."""
    open_ones: list[str] = []
    deepest = 0
    for character in response:
        if character in "([{":
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
        elif character in _PAIRS:
            if open_ones and open_ones[-1] == _PAIRS[character]:
                if deepest >= _DEEPEST_BRACKETS:
                    return True
                open_ones.pop()
            else:
                open_ones, deepest = [], 0
    return False


def _quotes(response: str) -> bool:
    """Double and single quotes in turn, three deep, and all three closed; an apostrophe is no quote."""
    text = re.sub(r"(?<=\w)['’](?=\w)", "", response)
    text = text.translate(str.maketrans("“”‘’", "\"\"''"))
    open_ones: list[str] = []
    closed = 0
    for mark in re.findall(r"[\"']", text):
        if open_ones and open_ones[-1] == mark:
            open_ones.pop()
            closed += 1
            if closed >= _DEEPEST_QUOTES:
                return True
        else:
            open_ones.append(mark)
            closed = 0
    return False


def _options(response: str, options: str) -> bool:
    separator = "/" if "/" in options else " or " if " or " in options else ","
    choices = [choice.strip() for choice in options.split(separator)]
    if re.match(r"\W*a\W*b\W*c", options, re.IGNORECASE):  # letters: with their marks, as they stand there
        return response in choices
    return response.strip(EDGES).lower() in [choice.strip(EDGES).lower() for choice in choices]


def _newline(response: str) -> bool:
    lines = [line for line in bare(response).split("\n") if line.strip()]
    return all(len(line.split()) == 1 for line in lines)


def _emoji(response: str) -> bool:
    """Tells whether an emoji follows each sentence, before or behind its mark."""
    found = re.split(r"(?<=[.!?])(?=\s+[^\s])", " ".join(response.split()))
    found = [piece.strip() for piece in found if piece.strip()]
    for here, after in pairwise([*found, ""]):
        end = bare(here).strip()[-2:]
        start = bare(after).strip()[:1]
        if not any(map(is_emoji, end + start)):
            return False
    return bool(found)


def _line_indent(response: str) -> bool:
    lines = [line for line in response.split("\n") if line.strip()]
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return all(a < b for a, b in pairwise(indents))


def _quote_unquote(response: str) -> bool:
    """Something unquoted stands between two quoted phrases, and after the last."""
    text = "".join(response.replace("“", '"').replace("”", '"').split())
    marks = string.digits + string.punctuation.replace('"', "")
    return '""' not in text and not text.strip(marks).endswith('"')


def _list(response: str, sep: str) -> bool:
    return response.count(sep) >= 2


def _thesis(response: str) -> bool:
    """The first text in italics is not empty, and something follows it."""
    spans = []
    for opening, closing in _ITALICS.values():
        start = opening.search(response)
        end = closing.search(response, start.end()) if start else None
        if start and end:
            spans.append((start.end(), end.start(), end.end()))
    if not spans:
        return False
    start_of_text, end_of_text, after = min(spans)
    return bool(response[start_of_text:end_of_text].strip()) and bool(response[after:].strip())


def _sub_bullets(response: str) -> bool:
    """Tells whether there is a bullet, and each has a sub-bullet."""
    _, *bullets = response.split("*")
    return bool(bullets) and all("-" in bullet for bullet in bullets)


def _sentences_then_bullets(response: str) -> bool:
    lines = [line.strip() for line in response.split("\n") if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("*")), len(lines))
    bullets = lines[first:]
    said = [sentence for line in lines[:first] for sentence in sentences_of(line) if sentence.endswith(".")]
    return len(said) >= 2 and len(bullets) >= 2 and all(line.startswith("*") for line in bullets)


def _title_case(response: str) -> bool:
    """Every major word begins with a capital; the first word too."""
    found = [token for token in tokens(response) if token[0].isalpha()]
    return all(word[0].isupper() or (place > 0 and word in _MINOR) for place, word in enumerate(found))


def _output_template(response: str) -> bool:
    """The three headings, in order."""
    places = [response.find(heading) for heading in _TEMPLATE]
    return places[0] >= 0 and all(a < b for a, b in pairwise(places))


def _no_whitespace(response: str) -> bool:
    return not any(map(str.isspace, response))


CHECKS: dict[str, Check] = {
    "format:parentheses": _parentheses,
    "format:quotes": _quotes,
    "format:options": _options,
    "format:newline": _newline,
    "format:emoji": _emoji,
    "format:line_indent": _line_indent,
    "format:quote_unquote": _quote_unquote,
    "format:list": _list,
    "format:thesis": _thesis,
    "format:sub-bullets": _sub_bullets,
    "format:no_bullets_bullets": _sentences_then_bullets,
    "format:title_case": _title_case,
    "format:output_template": _output_template,
    "format:no_whitespace": _no_whitespace,
}
