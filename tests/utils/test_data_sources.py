import json

import pytest

from slime.utils.data import DataError, Dataset, get_source
from slime.utils.data_sources import Source, epoch_order, find_sources
from tools.make_tiny_model import make_tokenizer


def write_file(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def mixture(tmp_path):
    """A function that writes the YAML file of sources with 6 and 2 prompts."""
    paths = {
        "many": write_file(tmp_path / "many.jsonl", *(f"m{i}" for i in range(6))),
        "few": write_file(tmp_path / "few.jsonl", "f0", "f1"),
    }

    def write(**weights):
        lines = [{"name": name, "path": paths[name]} for name in paths]
        lines = [
            line | ({"weight": weights[line["name"]]} if line["name"] in weights else {}) for line in lines
        ]
        (tmp_path / "mixture.yaml").write_text(json.dumps({"sources": lines}))
        return str(tmp_path / "mixture.yaml")

    return write


def texts(dataset):
    return [sample.prompt for sample in dataset.samples]


def test_sources_without_weights_come_whole_and_with_their_names(mixture):
    dataset = Dataset(mixture(), None)
    assert texts(dataset) == [*(f"m{i}" for i in range(6)), "f0", "f1"]
    assert [get_source(sample) for sample in dataset.samples] == ["many"] * 6 + ["few"] * 2
    dataset.shuffle(0)
    assert sorted(texts(dataset)) == ["f0", "f1", *(f"m{i}" for i in range(6))]


def test_a_record_may_name_its_source_itself(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"text": "a", "metadata": {"source_name": "mine"}}))
    (tmp_path / "mixture.yaml").write_text(json.dumps({"sources": [{"name": "ours", "path": str(path)}]}))
    assert get_source(Dataset(str(tmp_path / "mixture.yaml"), None)[0]) == "mine"


@pytest.mark.parametrize("shuffled", [False, True])
def test_weights_are_shares_and_sources_go_on_over_epochs(mixture, shuffled):
    dataset = Dataset(mixture(many=1, few=1), None)
    seen = []
    for epoch in range(3):
        dataset.arrange(epoch, shuffled)
        order = texts(dataset)
        assert sum(text.startswith("f") for text in order) == 4
        seen += [text for text in order if text.startswith("m")]
    assert sorted(seen) == sorted([f"m{i}" for i in range(6)] * 2)
    if not shuffled:
        assert seen == [f"m{i}" for i in range(6)] * 2


def test_weighted_sources_are_spread_evenly_where_nothing_is_shuffled(mixture):
    dataset = Dataset(mixture(many=3, few=1), None)
    dataset.arrange(0, shuffled=False)
    assert texts(dataset) == ["m0", "m1", "f0", "m2", "m3", "m4", "f1", "m5"]
    dataset.arrange(1, shuffled=False)
    assert texts(dataset) == ["m0", "m1", "f0", "m2", "m3", "m4", "f1", "m5"]


def test_each_pass_over_a_weighted_source_has_an_order_of_its_own():
    halves = [
        {i for i in epoch_order([20, 20], [1, 3], 1, epoch, shuffled=True) if i < 20} for epoch in range(4)
    ]
    assert halves[0] | halves[1] == halves[2] | halves[3] == set(range(20))
    assert halves[0] != halves[2]


def test_the_order_of_one_source_is_the_one_it_always_was():
    import random

    order = list(range(20))
    random.Random(42 + 3).shuffle(order)
    assert list(epoch_order([20], None, 42, 3, shuffled=True)) == order
    assert list(epoch_order([20], None, 42, 3, shuffled=False)) == list(range(20))


def test_other_weights_are_other_data(mixture):
    fingerprints = {
        Dataset(mixture(**w), None).fingerprint for w in ({}, dict(many=1, few=1), dict(many=2, few=1))
    }
    assert len(fingerprints) == 3


def test_what_is_looked_at_late_has_the_same_fingerprint(mixture):
    path = mixture(many=1, few=1)
    assert Dataset(path, None, check=False).fingerprint == Dataset(path, None).fingerprint


def test_long_prompts_are_left_out_of_each_source(tmp_path, mixture):
    tokenizer = make_tokenizer()
    write_file(tmp_path / "few.jsonl", "f0", "x" * 30)
    write_file(tmp_path / "many.jsonl", "é" * 30, "m1", "m2")
    dataset = Dataset(mixture(), tokenizer, max_length=8)
    assert texts(dataset) == ["m1", "m2", "f0"]
    assert dataset.num_too_long == 2
    write_file(tmp_path / "few.jsonl", "x" * 30)
    with pytest.raises(DataError, match=r"few.jsonl: no prompt of at most 8 tokens among 1 records"):
        Dataset(mixture(), tokenizer, max_length=8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sources: []", "expected one key, sources, with a list"),
        ("[]", "expected one key, sources, with a list"),
        ("{sources: [{name: a, path: b}], more: 1}", "expected one key, sources"),
        ("{", "cannot read as YAML"),
        ("sources: [{path: b}]", r"source 1 is {'path': 'b'}, expected name, path and perhaps weight"),
        ("sources: [{name: a, path: b, wait: 1}]", r"source 1 is .*'wait': 1"),
        ("sources: [{name: 3, path: b}]", r"source 1: name is 3, expected text"),
        ("sources: [{name: a, path: b, weight: 0}]", r"source 1: weight is 0, expected a number above 0"),
        (
            "sources: [{name: a, path: b, weight: .inf}]",
            r"source 1: weight is inf, expected a number",
        ),
        (
            "sources: [{name: a, path: b, weight: true}]",
            r"source 1: weight is True, expected a number",
        ),
        ("sources: [{name: a, path: b}, {name: a, path: c}]", r"2 sources have the name 'a', expected one"),
        ("sources: [{name: a, path: b, weight: 1}, {name: c, path: d}]", r"source 'c' has no weight"),
        ("sources: [{name: a, path: b.yaml}]", r"source 1: path b.yaml is a YAML file, expected data"),
    ],
)
def test_a_mixture_that_is_none_is_named(tmp_path, content, message):
    path = tmp_path / "mixture.yaml"
    path.write_text(content)
    with pytest.raises(DataError, match=rf"mixture.yaml: {message}"):
        find_sources(str(path))


def test_a_mixture_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.yaml: cannot read as YAML \(.*No such file"):
        find_sources(str(tmp_path / "nowhere.yaml"))
    assert find_sources("data.jsonl@[:3]") == [Source("data.jsonl@[:3]")]
