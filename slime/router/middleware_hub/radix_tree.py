"""Trajectories by their text: which tokens made it, as the engine sampled them.

    tree = StringRadixTrie(max_cache_size=1_000_000, tokenizer=tokenizer)
    tree.insert(text, token_ids, logp, loss_mask, weight_version=3)
    ids, logp, loss_mask = tree.retrieve_from_text(text + " and more")

Tokenizing a text again need not give the tokens that made it. So what was generated is looked up.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.router.middleware_hub.token_runs import EMPTY, TokenRun, joined
from slime.router.middleware_hub.tree_nodes import Match, Node, descend, node_at

logger = logging.getLogger(__name__)

DEFAULT_CACHE_TOKENS = 10_000


@dataclass(frozen=True)
class MatchResult:
    """The longest known beginning of a text.

    Attributes:
        matched_prefix: its characters, ``remaining_string`` those after it.
        token_ids: its tokens, the beginning of one trajectory; ``logp`` and ``loss_mask`` are as long.
        last_node: the node of the tree that holds the last of them.
    """

    matched_prefix: str
    token_ids: list[int]
    logp: list[float]
    loss_mask: list[int]
    remaining_string: str
    last_node: Node


class StringRadixTrie:
    """A radix tree over texts whose edges hold tokens, and are split where trajectories part.

    A text that was inserted gives exactly its latest trajectory. Other texts give the longest beginning of
    one trajectory, cut after a token, that the text begins with. Log-probs are kept as float32. All methods
    may be called from any thread.

    Args:
        max_cache_size: tokens; the trajectories that were not used for longest leave first.
        gc_threshold_k: a trajectory leaves once weights this many versions newer than its own are seen.
        tokenizer: of ``transformers``; without one nothing can be retrieved that was not inserted, and a text
            is split nowhere.
        verbose: log what is collected.
    """

    def __init__(
        self,
        max_cache_size: int = DEFAULT_CACHE_TOKENS,
        gc_threshold_k: int = 5,
        tokenizer: Any = None,
        verbose: bool = False,
    ) -> None:
        self.max_cache_size, self.gc_threshold_k = max_cache_size, gc_threshold_k
        self.tokenizer, self.verbose = tokenizer, verbose
        self._lock = threading.RLock()
        self._newest = -1  # version seen
        self._clear()

    def insert(
        self,
        text: str,
        token_ids: Sequence[int],
        logp: Sequence[float] | None = None,
        loss_mask: Sequence[int] | None = None,
        weight_version: int | None = None,
    ) -> bool:
        """Stores a trajectory, in place of another one with this text; False if there is no room for it.

        Raises:
            ValueError: the lengths differ, or there are no tokens.
        """
        logp = [0.0] * len(token_ids) if logp is None else logp
        loss_mask = [0] * len(token_ids) if loss_mask is None else loss_mask
        if not len(token_ids) == len(logp) == len(loss_mask) > 0:
            raise ValueError(
                f"{len(token_ids)} tokens, {len(logp)} log-probs and {len(loss_mask)} mask entries "
                "(wanted: equally many, and at least one)"
            )
        run = TokenRun.of(text, token_ids, logp, loss_mask, self.tokenizer)
        return self.insert_run(run, weight_version)

    def insert_run(self, run: TokenRun, weight_version: int | None = None) -> bool:
        """Inserts a trajectory whose text has been parted already; it has at least one token."""
        if len(run) > self.max_cache_size:
            return False
        with self._lock:
            former = descend(self._root, run.text).complete
            node, shared = node_at(self._root, run, self._tick())
            self._tokens += len(run) - shared
            node.version = weight_version
            self._recent[node] = None
            self._recent.move_to_end(node)
            for other in former:
                if other is not node:
                    self._forget(other)
            if weight_version is not None and weight_version > self._newest:
                self._newest = weight_version
                self.gc_by_weight_version(weight_version)
            self._make_room()
        return True

    def find_longest_prefix(self, text: str) -> MatchResult:
        with self._lock:
            match = descend(self._root, text)
            run = match.run()
            self._touch(match)
        rest = text[len(run.text) :]
        return MatchResult(run.text, run.ids, run.logp, run.loss_mask, rest, match.node)

    def retrieve_from_text(
        self, text: str, return_logprob: bool = True
    ) -> tuple[list[int], list[float] | None, list[int]]:
        """Token ids, log-probs (None if not wanted) and loss mask of a text.

        What follows the last generated token that is known is tokenized, as a piece of its own, with log-prob
        and mask 0; so prompts are tokenized as they would be without this tree. The result is kept.

        Raises:
            ValueError: something has to be tokenized, and there is no tokenizer.
        """
        run = self.whole(text)
        return run.ids, run.logp if return_logprob else None, run.loss_mask

    def whole(self, text: str) -> TokenRun:
        """Retrieves like ``retrieve_from_text``, as a run."""
        run = self.known(text)
        if len(run.text) < len(text):
            run = joined([run, self.tokenize(text[len(run.text) :])])
            self.insert_run(run)
        return run

    def known(self, text: str) -> TokenRun:
        """The whole text, if a trajectory has it; else its longest known beginning that ends with a generated
        token."""
        with self._lock:
            match = descend(self._root, text)
            self._touch(match)
            run = match.run()
            return run if match.complete else run.until_last_generated()

    def tokenize(self, text: str) -> TokenRun:
        """Tokens that nobody generated."""
        if self.tokenizer is None:
            raise ValueError(f"text {text[:40]!r} is not known and there is no tokenizer")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(f"text {text[:40]!r} has no tokens")
        return TokenRun.of(text, ids, [0.0] * len(ids), [0] * len(ids), self.tokenizer)

    def remove(self, text: str) -> bool:
        """Forgets the trajectory with this text and those that go on from it; False if there is none."""
        with self._lock:
            found = descend(self._root, text).complete
            for node in found:
                for below in list(node.subtree()):
                    self._forget(below)
            return bool(found)

    def gc_by_weight_version(self, current_weight_version: int) -> int:
        """Forgets what weights of ``gc_threshold_k`` versions before or older made; returns tokens freed.

        Each trajectory has its own version; those without one stay.
        """
        oldest = current_weight_version - self.gc_threshold_k
        with self._lock:
            before = self._tokens
            for node in [n for n in self._recent if n.version is not None and n.version <= oldest]:
                self._forget(node)
            freed = before - self._tokens
        if self.verbose and freed:
            logger.info("radix tree: %d tokens of weights %d and older forgotten", freed, oldest)
        return freed

    def clear(self) -> None:
        with self._lock:
            self._clear()

    def get_stats(self) -> dict[str, Any]:
        """Sizes, and how often a text was known in full, in part or not at all."""
        with self._lock:
            return {
                "cur_cache_size": self._tokens,
                "max_cache_size": self.max_cache_size,
                "total_entries": len(self._recent),
                "cache_hits": self._hits,
                "cache_partial_hits": self._partial_hits,
                "cache_misses": self._misses,
                "evictions": self._evictions,
            }

    def pretty_print(self) -> None:
        """Every edge with its tokens, indented by depth."""
        with self._lock:
            for node in self._root.subtree():
                if node.parent is not None:
                    version = f" version {node.version}" if node in self._recent else ""
                    print(f"{'  ' * (node.depth - 1)}{node.run.text!r} {node.run.ids}{version}")

    def _clear(self) -> None:
        self._root = Node(EMPTY, None)
        self._recent: OrderedDict[Node, None] = OrderedDict()  # ends of trajectories, the latest used last
        self._tokens = self._clock = self._hits = self._partial_hits = self._misses = self._evictions = 0
        self._newest = -1

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _touch(self, match: Match) -> None:
        """What the match made use of was used now."""
        if match.complete:
            self._hits += 1
        elif match.node.parent is not None:
            self._partial_hits += 1
        else:
            self._misses += 1
        for node in match.node.with_ancestors():
            if node in self._recent:
                self._recent.move_to_end(node)

    def _make_room(self) -> None:
        while self._tokens > self.max_cache_size:
            self._evictions += 1
            self._forget(next(iter(self._recent)))

    def _forget(self, node: Node) -> None:
        """Drops a trajectory, and of its tokens those that no other one shares."""
        if node not in self._recent:
            return
        del self._recent[node]
        node.ends = 0
        while node.parent is not None and not node.ends and not node.has_children:
            self._tokens -= len(node.run)
            node = node.detach()
        if node.parent is not None and not node.ends:
            node.merge_only_child()
