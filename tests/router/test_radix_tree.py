"""The tree of trajectories against a list of them, on random operations and tokenizers."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.router.middleware_hub.radix_tree import StringRadixTrie
from slime.router.middleware_hub.token_runs import TokenRun
from slime.router.middleware_hub.token_text import token_spans
from slime.router.middleware_hub.tree_nodes import descend
from tests.router.bpe import WORDS, byte_level, word_pieces


class Oracle:
    """Every trajectory in a list, the latest last; knows nothing of trees."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.kept: dict[str, tuple[TokenRun, int | None]] = {}

    def insert(self, text: str, ids: list[int], logp: list[float], mask: list[int], version) -> None:
        self.kept.pop(text, None)
        self.kept[text] = TokenRun.of(text, ids, logp, mask, self.tokenizer), version

    def longest(self, text: str) -> int:
        """Characters of the longest beginning of one trajectory, cut after a token, that the text has."""
        best = 0
        for run, _ in self.kept.values():
            ends = run.ends.tolist()
            fitting = [
                end
                for end, closed in zip(ends, run.closed, strict=True)
                if closed and text.startswith(run.text[:end])
            ]
            best = max([best, *fitting])
        return best

    def beginnings(self, length: int) -> list[tuple]:
        """(ids, logp, mask) of every trajectory up to every token that ends there."""
        found = []
        for run, _ in self.kept.values():
            for count, (end, closed) in enumerate(zip(run.ends.tolist(), run.closed, strict=True), 1):
                if closed and end == length:
                    found.append((run.ids[:count], run.logp[:count], run.loss_mask[:count]))
        return found


def random_tokens(text: str, tokenizer, rng: random.Random) -> list[int]:
    """One of the many ways in which the text could have been sampled: pieces tokenized apart."""
    ids = []
    while text:
        cut = rng.randint(1, len(text))
        ids += tokenizer(text[:cut], add_special_tokens=False)["input_ids"]
        text = text[cut:]
    return ids


def check_invariants(tree: StringRadixTrie) -> None:
    nodes = list(tree._root.subtree())[0:]
    assert sum(len(node.run) for node in nodes) == tree._tokens <= tree.max_cache_size
    for node in nodes:
        if node.parent is not None:
            assert len(node.run) and node.run.closed[-1]
            assert node.has_children or node.ends, "a leaf is the end of a trajectory"
            only = len(node.children) == 1
            assert node.ends or not only, "a split that nothing needs is undone"
        assert bool(node.ends) == (node in tree._recent)


def check_lookup(tree: StringRadixTrie, oracle: Oracle, text: str) -> None:
    match = tree.find_longest_prefix(text)
    assert match.matched_prefix + match.remaining_string == text
    assert len(match.matched_prefix) == oracle.longest(text)
    found = match.token_ids, match.logp, match.loss_mask
    if text in oracle.kept:
        run = oracle.kept[text][0]
        assert found == (run.ids, run.logp, run.loss_mask)
    elif match.matched_prefix:
        assert found in oracle.beginnings(len(match.matched_prefix))


def random_operations(seed: int, operations: int) -> None:
    """A tree without bounds and a list of trajectories go through the same."""
    rng = random.Random(seed)
    tokenizer = byte_level()
    tree, oracle = StringRadixTrie(10**9, gc_threshold_k=3, tokenizer=tokenizer), Oracle(tokenizer)
    texts = [""]
    version = 0
    for _ in range(operations):
        text = rng.choice(texts[-8:])[: rng.choice([3, 10, 1000])] + "".join(rng.choices(WORDS, k=2))
        action = rng.random()
        if action < 0.45:
            ids = random_tokens(text, tokenizer, rng)
            logp = [-rng.choice([0.25, 0.5, 1.0]) for _ in ids]
            mask = [rng.randint(0, 1) for _ in ids]
            made_by = rng.choice([None, version])
            assert tree.insert(text, ids, logp, mask, made_by)
            oracle.insert(text, ids, logp, mask, made_by)
            if made_by is not None:
                forget_old(oracle, version - 3)
            texts.append(text)
        elif action < 0.9:
            check_lookup(tree, oracle, text[: rng.randint(0, len(text))])
            check_lookup(tree, oracle, rng.choice(texts))
        elif action < 0.93:
            remove(tree, oracle, rng.choice(texts))
        else:
            version += 1
    check_invariants(tree)
    assert tree.get_stats()["total_entries"] == len(oracle.kept)


def forget_old(oracle: Oracle, oldest: int) -> None:
    old = [text for text, (_, version) in oracle.kept.items() if version is not None and version <= oldest]
    for text in old:
        del oracle.kept[text]


def remove(tree: StringRadixTrie, oracle: Oracle, text: str) -> None:
    """What goes on from the trajectory token for token goes with it."""
    assert tree.remove(text) == (text in oracle.kept)
    if text in oracle.kept:
        rows = oracle.kept[text][0].rows.tolist()
        below = [other for other, (run, _) in oracle.kept.items() if run.rows[: len(rows)].tolist() == rows]
        for other in below:
            if other.startswith(text):
                del oracle.kept[other]


NIGHTLY = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(14, 40)]


@pytest.mark.parametrize("seed", [*range(14), *NIGHTLY])
def test_the_tree_gives_what_a_list_of_all_trajectories_gives(seed: int) -> None:
    random_operations(seed, 250)


@given(
    st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map("".join), min_size=2, max_size=8)
)
@settings(max_examples=60, deadline=None)
def test_every_text_gives_its_own_tokens_back(texts: list[str]) -> None:
    rng, tokenizer = random.Random(0), byte_level()
    tree = StringRadixTrie(10**6, tokenizer=tokenizer)
    sampled = {}
    for text in texts:
        ids = random_tokens(text, tokenizer, rng)
        sampled[text] = ids, [-rng.random() for _ in ids], [1] * len(ids)
        tree.insert(text, *sampled[text])
    for text, (ids, logp, mask) in sampled.items():
        found = tree.retrieve_from_text(text)
        assert found[0] == ids and found[2] == mask
        assert found[1] == pytest.approx(logp, abs=1e-6)
    check_invariants(tree)


def test_tokens_differ_from_a_new_tokenization_and_are_kept_all_the_same() -> None:
    tokenizer = byte_level()
    text = "lowest then the lower"
    ids = [token for letter in text for token in tokenizer(letter)["input_ids"]]
    assert ids != tokenizer(text)["input_ids"], "letter by letter must not be how it is tokenized"
    tree = StringRadixTrie(tokenizer=tokenizer)
    tree.insert(text, ids, [-1.0] * len(ids), [1] * len(ids))
    more, logp, mask = tree.retrieve_from_text(text + " newer")
    rest = tokenizer(" newer")["input_ids"]
    assert more == ids + rest
    assert logp == [-1.0] * len(ids) + [0.0] * len(rest)
    assert mask == [1] * len(ids) + [0] * len(rest)


def test_of_two_tokenizations_that_go_equally_far_the_one_inserted_last_is_given() -> None:
    tokenizer = byte_level()
    tree = StringRadixTrie(10**6, tokenizer=tokenizer)
    apart = [token for piece in ("l", "o", "w", "!") for token in tokenizer(piece)["input_ids"]]
    together = tokenizer("low?")["input_ids"]
    assert together[:-1] != apart[:-1]
    for text, ids in (("low!", apart), ("low?", together), ("low!", apart)):
        tree.insert(text, ids, [0.0] * len(ids), [1] * len(ids), 0)
        assert tree.find_longest_prefix("low.").token_ids == ids[:-1]


def test_the_same_tokens_with_other_texts_are_two_trajectories() -> None:
    tokenizer = byte_level()
    tree = StringRadixTrie(10**6, tokenizer=tokenizer)
    ids = [*tokenizer("a")["input_ids"], 10**6]  # no token of this tokenizer: its text is what is left
    for text in ("aX", "aY"):
        tree.insert(text, ids, [0.0, 0.0], [1, 1], 0)
    assert [tree.find_longest_prefix(text).matched_prefix for text in ("aX", "aY")] == ["aX", "aY"]


@pytest.mark.parametrize(("mask", "left"), [([1, 0, 0], 0), ([1, 1, 0], 2), ([0, 1, 0], 2), ([0, 0, 1], 3)])
def test_what_follows_the_last_generated_token_is_cut_off_after_a_character(mask, left) -> None:
    tokenizer = byte_level()
    ids = tokenizer.convert_tokens_to_ids(
        ["\u00c3", "\u00a9", "!"]
    )  # the two bytes of e with an acute accent
    run = TokenRun.of("\u00e9!", ids, [0.0] * 3, mask, tokenizer).until_last_generated()
    assert (run.ids, run.text) == (ids[:left], "\u00e9!"[: max(0, left - 1)])


def test_two_answers_share_their_prompt_and_part_within_an_edge() -> None:
    tokenizer = byte_level()
    tree = StringRadixTrie(tokenizer=tokenizer)
    prompt = tokenizer("the lower ")["input_ids"]
    answers = {word: tokenizer(word)["input_ids"] for word in ("lowest", "wide", "lower")}
    for word, ids in answers.items():
        mask = [0] * len(prompt) + [1] * len(ids)
        tree.insert("the lower " + word, prompt + ids, None, mask)
    separate = sum(len(prompt) + len(ids) for ids in answers.values())
    assert tree.get_stats()["cur_cache_size"] <= separate - 2 * len(prompt)
    for word, ids in answers.items():
        assert tree.retrieve_from_text("the lower " + word)[0] == prompt + ids


def test_a_prompt_is_tokenized_as_if_there_were_no_tree() -> None:
    """Another prompt's beginning is known, but a tokenizer would not have cut it there."""
    tokenizer = byte_level()
    tree = StringRadixTrie(tokenizer=tokenizer)
    tree.retrieve_from_text("the low")
    assert tree.find_longest_prefix("the lower").matched_prefix == "the low"
    assert tree.retrieve_from_text("the lower")[0] == tokenizer("the lower")["input_ids"]


def test_special_tokens_without_text_stay_where_they_were_sampled() -> None:
    tokenizer = byte_level()
    eos = tokenizer.eos_token_id
    tree = StringRadixTrie(tokenizer=tokenizer)
    ids = [*tokenizer("the low")["input_ids"], eos]
    tree.insert("the low", ids, None, [1] * len(ids))
    assert tree.retrieve_from_text("the low")[0] == ids
    longer = [*ids, *tokenizer("\n\nwide")["input_ids"], eos]
    tree.insert("the low\n\nwide", longer, None, [1] * len(longer))
    assert tree.retrieve_from_text("the low")[0] == ids
    assert tree.retrieve_from_text("the low\n\nwide")[0] == longer


@pytest.mark.parametrize("text", ["日本🙂", "héllo the", "a\n\n🙂🙂"])
def test_a_character_of_several_tokens_is_never_parted(text: str) -> None:
    tokenizer = byte_level()
    ids = [token for byte in text.encode() for token in tokenizer.convert_tokens_to_ids([_letter(byte)])]
    lengths, closed = token_spans(text, ids, tokenizer)
    assert lengths.sum() == len(text) and closed.sum() == len(text)
    position = 0
    for length, end in zip(lengths, closed, strict=True):
        assert end or length == 0
        position += length
    assert position == len(text)


def _letter(byte: int) -> str:
    letters = {value: key for key, value in _letters().items()}
    return letters[byte]


def _letters() -> dict[str, int]:
    from slime.router.middleware_hub.token_text import _byte_letters

    return _byte_letters()


def test_a_tokenizer_that_is_not_byte_level_is_parted_by_decoding() -> None:
    tokenizer = word_pieces()
    text = "the lower the newer"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    lengths, closed = token_spans(text, ids, tokenizer)
    assert lengths.sum() == len(text) and closed.all()
    tree = StringRadixTrie(tokenizer=tokenizer)
    tree.insert(text, ids, None, [1] * len(ids))
    first = len(tokenizer("the lower", add_special_tokens=False)["input_ids"])
    assert tree.find_longest_prefix("the lower").token_ids == ids[:first]


def test_the_least_recently_used_leave_when_there_is_no_room() -> None:
    tree = StringRadixTrie(max_cache_size=6)
    for index, text in enumerate(["aa", "bb", "cc"]):
        tree.insert(text, [index, index])
    tree.retrieve_from_text("aa")
    tree.insert("dd", [9, 9])
    assert tree.find_longest_prefix("bb").matched_prefix == ""
    assert [bool(tree.find_longest_prefix(text).token_ids) for text in ("aa", "cc", "dd")] == [True] * 3
    assert not tree.insert("too long", list(range(7)))
    check_invariants(tree)


def _left(tree: StringRadixTrie, texts: str) -> str:
    """Returns those of these texts that are known, looked up without being used."""
    return "".join(text for text in texts if descend(tree._root, text).complete)


def test_whatever_uses_a_trajectory_makes_it_the_last_to_leave() -> None:
    """Being inserted, inserted again, looked up, and being the beginning of what is looked up."""
    for use, left in (
        (lambda tree: None, "bcd"),
        (lambda tree: tree.insert("a", [0]), "acd"),
        (lambda tree: tree.retrieve_from_text("a"), "acd"),
        (lambda tree: tree.find_longest_prefix("ax"), "acd"),
        (lambda tree: (tree.retrieve_from_text("b"), tree.retrieve_from_text("a")), "abd"),
    ):
        tree = StringRadixTrie(max_cache_size=3)
        for number, text in enumerate("abc"):
            tree.insert(text, [number])
        use(tree)
        tree.insert("d", [3])
        assert _left(tree, "abcd") == left
        assert tree.get_stats()["evictions"] == 1


def test_tokens_are_counted_once_however_many_trajectories_share_them() -> None:
    tree, counts = StringRadixTrie(tokenizer=byte_level()), []
    for text in ("ab", "abc", "abd", "abc", "ab"):
        ids = [token for letter in text for token in tree.tokenizer(letter)["input_ids"]]
        tree.insert(text, ids)
        counts.append(tree.get_stats()["cur_cache_size"])
    assert counts == [2, 3, 4, 4, 4]
    tree.remove("abd")
    assert tree.get_stats()["cur_cache_size"] == 3


@given(st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_the_bound_holds_whatever_is_inserted(seed: int) -> None:
    rng, tokenizer = random.Random(seed), byte_level()
    tree = StringRadixTrie(max_cache_size=60, tokenizer=tokenizer)
    text = ""
    for _ in range(60):
        text = text[: rng.choice([0, 5, 40])] + "".join(rng.choices(WORDS, k=3))
        ids = random_tokens(text, tokenizer, rng)
        if tree.insert(text, ids, [-rng.choice([0.5, 1.0]) for _ in ids], None, rng.randint(0, 9)):
            assert tree.find_longest_prefix(text).token_ids in ([], ids)
        check_invariants(tree)


def test_old_weights_leave_by_each_trajectory_of_their_own() -> None:
    """A child may be older than its parent: it was made first, and the parent was made again."""
    tree = StringRadixTrie(gc_threshold_k=2, tokenizer=byte_level())
    low, lower = [tree.tokenizer(text)["input_ids"] for text in ("low", "lower the")]
    tree.insert("lower the", lower, weight_version=1)
    tree.insert("low", low, weight_version=3)
    assert tree.find_longest_prefix("lower the").token_ids == low
    assert tree.gc_by_weight_version(4) == 0
    assert tree.gc_by_weight_version(5) == len(low)


def test_a_trajectory_that_does_not_fit_together_is_refused() -> None:
    tree = StringRadixTrie()
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs and 2 mask entries"):
        tree.insert("ab", [1, 2], [0.0])
    with pytest.raises(ValueError, match="at least one"):
        tree.insert("", [])
    with pytest.raises(ValueError, match="there is no tokenizer"):
        tree.retrieve_from_text("unknown")


def test_removing_and_clearing() -> None:
    tree = StringRadixTrie(tokenizer=byte_level())
    tree.retrieve_from_text("lower")
    assert tree.remove("lower") and not tree.remove("lower")
    tree.retrieve_from_text("lower")
    tree.clear()
    assert tree.get_stats()["cur_cache_size"] == tree.get_stats()["total_entries"] == 0


def test_threads_may_share_a_tree() -> None:
    tokenizer = byte_level()
    tree = StringRadixTrie(max_cache_size=400, gc_threshold_k=3, tokenizer=tokenizer)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for round_number in range(60):
                text = "".join(rng.choices(WORDS, k=4))
                ids = random_tokens(text, tokenizer, rng)
                tree.insert(text, ids, None, [1] * len(ids), round_number // 10)
                assert tokenizer.decode(tree.retrieve_from_text(text)[0]) == text
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    check_invariants(tree)


def test_printing_shows_every_edge(capsys: pytest.CaptureFixture[str]) -> None:
    tree = StringRadixTrie()
    tree.insert("ab", [1, 2], weight_version=7)
    tree.pretty_print()
    assert capsys.readouterr().out == "'ab' [1, 2] version 7\n"
    assert tree.get_stats()["total_entries"] == 1
