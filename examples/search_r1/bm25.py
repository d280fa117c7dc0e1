"""A search index in memory: BM25 over passages of text, without a server and without a download."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

_WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())


class BM25Index:
    """Passages ranked by BM25 (Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009).

    With tf the count of a word in a passage of n words, N passages, df of which have the word, and the mean
    length m, the score of a passage is the sum over the words of the query of

        ln(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 * (1 - b + b * n / m))

    All weights are computed once: a query adds up as many arrays as it has words.
    """

    def __init__(self, passages: Iterable[str], k1: float = 0.9, b: float = 0.4) -> None:
        self.passages = list(passages)
        counts = [Counter(words_of(passage)) for passage in self.passages]
        lengths = np.array([count.total() for count in counts], dtype=np.float64)
        norms = k1 * (1 - b + b * lengths / max(lengths.mean(), 1)) if counts else lengths
        found: dict[str, tuple[list[int], list[int]]] = {}
        for number, count in enumerate(counts):
            for word, frequency in count.items():
                numbers, frequencies = found.setdefault(word, ([], []))
                numbers.append(number)
                frequencies.append(frequency)
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word, (numbers, frequencies) in found.items():
            idf = np.log1p((len(counts) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            tf, where = np.array(frequencies, dtype=np.float64), np.array(numbers)
            self._postings[word] = where, idf * tf / (tf + norms[where])

    @staticmethod
    def from_jsonl(path: str | Path) -> "BM25Index":
        """From rows ``{"contents": "title and text"}``, as retrieval corpora are published.

        Raises:
            ValueError: a line is no such row.
        """
        passages = []
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    passages.append(str(json.loads(line)["contents"]))
                except (ValueError, TypeError, KeyError) as error:
                    raise ValueError(f'{path}:{number}: wanted {{"contents": TEXT}} ({error})') from error
        return BM25Index(passages)

    def scores(self, query: str) -> np.ndarray:
        """Scores each passage: float64 [N]."""
        scores = np.zeros(len(self.passages))
        for word in words_of(query):
            if word in self._postings:
                where, weights = self._postings[word]
                scores[where] += weights
        return scores

    def search(self, query: str, top_k: int) -> Sequence[str]:
        """At most ``top_k`` passages that share a word with the query, best first, ties in their order."""
        return [passage for passage, _ in self.ranked(query, top_k)]

    def ranked(self, query: str, top_k: int) -> Sequence[tuple[str, float]]:
        """Does the same, with their scores."""
        scores = self.scores(query)
        best = np.argsort(-scores, kind="stable")[:top_k]
        return [(self.passages[number], float(scores[number])) for number in best if scores[number] > 0]
