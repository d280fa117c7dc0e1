"""The tree of trajectories against a dict of prefixes and a sorted list.

    python benchmarks/radix_tree.py [--trajectories 100000] [--characters 4000] [--dict-trajectories 200]

Trajectories are those of rollouts in groups of 8: a shared prompt of a quarter of the characters and an
answer, in tokens of 4.5 characters. Look-ups are of half of the trajectories, each with a new turn after it,
which is what the next request of a conversation asks. Every way gives the tokens, log-probs and mask of the
longest known beginning that ends after a token:

- tree: `StringRadixTrie`;
- dict: the text up to each token maps to the trajectory and the number of tokens (with fewer trajectories,
  since it needs the square of the characters);
- list: all texts sorted, the neighbours of the place where a text would stand are compared with it.

Rates are per CPU second of one thread. Before a trajectory can be inserted, the text of each of its tokens is
found; `split_ms_per_trajectory` tells what that costs under a BPE tokenizer. Bytes are what the process grew
by, over the tokens of all trajectories, shared ones counted each time; ids and log-probs alone would take 8.
Writes JSON; the ratios are tree over the other.
"""

import argparse
import bisect
import gc
import json
import multiprocessing
import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slime.router.middleware_hub.radix_tree import StringRadixTrie
from slime.router.middleware_hub.token_runs import ID, LOGP, SPAN, TokenRun
from slime.router.middleware_hub.token_text import token_spans
from slime.router.middleware_hub.tree_nodes import common_length

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "radix_tree.json"
GROUP, WORDS, VOCABULARY = 8, 2000, 1000


class Way(Protocol):
    def insert(self, run: TokenRun) -> None: ...

    def find(self, text: str) -> TokenRun: ...


class Tree:
    def __init__(self) -> None:
        self._tree = StringRadixTrie(max_cache_size=10**12)

    def insert(self, run: TokenRun) -> None:
        self._tree.insert_run(run)

    def find(self, text: str) -> TokenRun:
        return self._tree.known(text)


class PrefixDict:
    def __init__(self) -> None:
        self._known: dict[str, tuple[TokenRun, int]] = {}

    def insert(self, run: TokenRun) -> None:
        for count, end in enumerate(run.ends.tolist(), 1):
            self._known[run.text[:end]] = run, count

    def find(self, text: str) -> TokenRun:
        for end in range(len(text), 0, -1):
            if (found := self._known.get(text[:end])) is not None:
                run, count = found
                return run.head(count)
        raise KeyError(text)


class SortedList:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._runs: dict[str, TokenRun] = {}

    def insert(self, run: TokenRun) -> None:
        bisect.insort(self._texts, run.text)
        self._runs[run.text] = run

    def find(self, text: str) -> TokenRun:
        place = bisect.bisect_left(self._texts, text)
        near = [self._runs[other] for other in self._texts[max(0, place - 1) : place + 1]]
        shared, best = max(((common_length(run.text, text, 0), run) for run in near), key=itemgetter(0))
        return best.head(best.tokens_within(shared))


@dataclass
class Workload:
    """Token ids of prompts and answers, and the words that they are."""

    prompts: np.ndarray
    answers: np.ndarray
    words: list[str]

    def run(self, index: int) -> TokenRun:
        ids = np.concatenate([self.prompts[index // GROUP], self.answers[index]])
        words = [self.words[word] for word in ids]
        rows = np.zeros((len(ids), 3), np.int32)
        rows[:, ID] = ids
        rows[:, LOGP] = np.full(len(ids), -1 / (1 + index % 97), np.float32).view(np.int32)
        rows[: self.prompts.shape[1], LOGP] = 0
        generated = np.arange(len(ids)) >= self.prompts.shape[1]
        rows[:, SPAN] = np.array([len(word) for word in words]) * 4 + 2 + generated
        return TokenRun("".join(words), rows)

    def queries(self, count: int) -> Iterator[str]:
        return (self.run(index).text + "and now?" for index in range(0, count, 2))


def workload(trajectories: int, characters: int) -> Workload:
    rng = random.Random(0)
    lengths = [1 + rng.randint(2, 5) for _ in range(WORDS)]
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=size - 1)) + " " for size in lengths]
    draw = np.random.default_rng(0)
    tokens = round(characters / 4.5)
    prompts = draw.integers(0, WORDS, (-(-trajectories // GROUP), tokens // 4), np.int32)
    answers = draw.integers(0, WORDS, (trajectories, tokens - tokens // 4), np.int32)
    return Workload(prompts, answers, words)


def timed(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(way: Callable[[], Way], load: Workload, count: int) -> dict[str, float]:
    """In a process of its own, which grows by nothing else."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(measure, way, load, count).result()


def measure(kind: Callable[[], Way], load: Workload, count: int) -> dict[str, float]:
    way = kind()
    gc.collect()
    before, tokens, seconds = psutil.Process().memory_info().rss, 0, 0.0
    for index in range(count):
        run = load.run(index)
        tokens += len(run)
        seconds += timed(lambda run=run: way.insert(run))
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    found = sum(timed(lambda query=query: way.find(query)) for query in load.queries(count))
    return {
        "trajectories": count,
        "tokens": tokens,
        "inserts_per_s": count / max(seconds, 1e-9),
        "lookups_per_s": (count + 1) // 2 / max(found, 1e-9),
        "bytes_per_token": grown / tokens,
    }


def check(load: Workload, count: int) -> None:
    """All three give the same."""
    ways: list[Way] = [Tree(), PrefixDict(), SortedList()]
    for index in range(count):
        for way in ways:
            way.insert(load.run(index))
    for query in load.queries(count):
        first, *others = [way.find(query).ids for way in ways]
        if any(ids != first for ids in others):
            raise RuntimeError(f"they differ for {query[:80]!r}")


def split_ms(load: Workload, count: int) -> float:
    """CPU ms per trajectory for the text of each token of a byte-level BPE, whose table is warm."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(load.words)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    texts = [load.run(index).text for index in range(count)]
    cases = [(text, fast(text)["input_ids"]) for text in texts]
    token_spans(*cases[0], fast)
    return 1e3 * timed(lambda: [token_spans(text, ids, fast) for text, ids in cases]) / count


def compare(options: Namespace) -> dict[str, Any]:
    load = workload(options.trajectories, options.characters)
    few = min(options.dict_trajectories, options.trajectories)
    result: dict[str, Any] = {
        "characters": options.characters,
        "tree": measured(Tree, load, options.trajectories),
        "sorted list": measured(SortedList, load, options.trajectories),
        f"tree, {few}": measured(Tree, load, few),
        f"dict of prefixes, {few}": measured(PrefixDict, load, few),
    }
    check(load, min(16, options.trajectories))
    result["split_ms_per_trajectory"] = split_ms(load, few)
    tree, sparse = result["tree"], result[f"tree, {few}"]
    result["ratio"] = {
        "sorted list": {key: _over(tree, result["sorted list"], key) for key in _RATES},
        "dict of prefixes": {key: _over(sparse, result[f"dict of prefixes, {few}"], key) for key in _RATES},
    }
    return result


def _over(ours: dict[str, float], theirs: dict[str, float], key: str) -> float:
    return ours[key] / max(theirs[key], 1e-9)


_RATES = ("inserts_per_s", "lookups_per_s", "bytes_per_token")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--characters", type=int, default=4000)
    parser.add_argument("--dict-trajectories", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = compare(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
