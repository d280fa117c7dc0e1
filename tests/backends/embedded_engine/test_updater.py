"""Weights and memory of a stand-in for the engine change when they may, and it is told."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from slime.backends.embedded_engine import memory_occupation, weight_updater
from slime.backends.embedded_engine.checkpoint import TornWeights
from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.memory_occupation import MemoryOccupation
from slime.backends.embedded_engine.named_weights import NamedWeights
from slime.backends.embedded_engine.weight_updater import WeightUpdater, named_tensors
from slime.utils.tensor_bucket import FlatBuffer, FlattenedTensorBucket, serialize_bucket, serialize_tensors
from slime.weight_sync.versions.codec import bytes_in, checksum
from slime.weight_sync.versions.live import ChangedBucket, SentTensor
from tests.each import hold_each

CPU = torch.device("cpu")


def weights_of_a_model():
    """They have an embedding of 6 numbers, and a place for ``w`` [2] in float32."""
    place = torch.zeros(2)
    return MagicMock(
        config=SimpleNamespace(device=CPU, dtype=torch.float32),
        flat=place,
        embedding=torch.zeros(2, 3),
        place=place,
        destination=lambda name, shape, dtype: (
            place if (name, shape, dtype) == ("w", (2,), torch.float32) else None
        ),
    )


@pytest.fixture
def parts():
    engine = MagicMock(released=set(), updating=False)
    engine.scheduler = MagicMock(live=[], weight_version="1")
    weights = weights_of_a_model()
    return engine, weights, WeightUpdater(engine, weights)


@pytest.fixture
def payload(monkeypatch):
    """What a payload holds, by its text."""
    held = {"pair": [("w", torch.ones(2))], "none": [("w", 1)]}
    monkeypatch.setattr(weight_updater, "deserialize_tensors", lambda text, opened: held[text])


def test_nothing_is_computed_while_an_update_is_open(parts):
    engine, _, updater = parts
    with pytest.raises(BadRequest, match="no weight update is open: /begin_weight_update comes first"):
        updater.end()
    for selector in ("all", "target"):
        updater.begin(selector)
        assert engine.updating is True and updater.session == selector
        with pytest.raises(BadRequest, match="open already: /end_weight_update comes first"):
            updater.begin("all")
        updater.end()
        assert engine.updating is False and updater.session is None
    with pytest.raises(BadRequest, match="selector 'draft': the embedded engine has no draft model"):
        updater.begin("draft")
    assert engine.updating is False and updater.session is None


@pytest.mark.parametrize("version", [None, "2"])
@pytest.mark.parametrize("flush", [False, True])
def test_weights_that_have_come_have_their_version_and_nothing_older_is_shared(
    parts, payload, version, flush
):
    engine, weights, updater = parts
    updater.begin("all")
    updater.from_tensors(["pair"], None, version, flush)
    ((name, tensor),) = weights.update.call_args.args[0]
    assert (name, tensor.tolist()) == ("w", [1.0, 1.0])
    assert engine.scheduler.weight_version == (version or "1")
    engine.scheduler.forget_shared.assert_called_once_with()
    assert engine.flush.call_count == flush


def test_what_ranks_keep_is_not_taken_where_the_checkpoint_is_quantised(parts, payload):
    engine, weights, _ = parts
    updater = WeightUpdater(engine, weights, stored=MagicMock())
    updater.begin("all")
    with pytest.raises(BadRequest, match="load_format 'direct': the checkpoint is quantised"):
        updater.from_tensors(["pair"], "direct", "2", False)
    assert engine.scheduler.weight_version == "1"


def test_what_ranks_keep_replaces_what_broke_off(parts, payload):
    _, _, updater = parts
    updater._torn, updater._shards = {"v", "w"}, MagicMock(update=lambda ranks: {"w"})
    updater.begin("all")
    updater.from_tensors(["pair"], "direct", "2", False)
    assert updater._torn == {"v"}


def test_memory_that_weights_come_through_is_kept_for_the_next_ones(parts):
    """What came by value has none, and what came otherwise is not read as an update."""
    _, weights, updater = parts
    updater.begin("all")
    buffer, places = FlatBuffer(), []
    for version in ("2", "3"):
        text = serialize_bucket(buffer.flatten([("w", torch.ones(2) * float(version))]))
        updater.from_tensors([text], "flattened_bucket", version, False)
        ((_, tensor),) = weights.update.call_args.args[0]
        assert tensor.tolist() == [float(version)] * 2
        places.append(tensor.data_ptr())
    assert places[0] == places[1] and len(updater._memory._kept) == 1
    for left in (True, True, False):  # a refused request is one that does not use it
        with pytest.raises(BadRequest):
            updater.from_tensors(["none"], "flattened_bucket", "4", False)
        assert bool(updater._memory._kept) == left
    (_, tensor), *_ = updater.of_ranks([serialize_tensors([("w", torch.ones(2))])], None)
    assert tensor.tolist() == [1.0, 1.0] and not updater._memory._used


def test_a_cache_that_cannot_be_flushed_is_told_of(parts, payload):
    engine, weights, updater = parts
    updater.begin("all")
    engine.flush.return_value = False
    with pytest.raises(BadRequest, match="weights are updated, but flushing the cache failed"):
        updater.from_tensors(["pair"], None, "2", True)
    assert weights.update.called and engine.scheduler.weight_version == "2"


def test_what_is_no_update_changes_nothing(parts, payload, tmp_path):
    engine, weights, updater = parts
    cases = [
        (lambda: updater.from_tensors(["pair"], None, "2", False), "between /begin_weight_update and /end"),
        (lambda: updater.from_group("g", [], None, "2", False), "between /begin_weight_update and /end"),
    ]
    opened = [
        (lambda: updater.from_tensors(["pair"], "pt", "2", False), "load_format 'pt': wanted one of"),
        (lambda: updater.from_tensors([], None, "2", False), r"0 payloads \(wanted: 1, one per TP rank\)"),
        (lambda: updater.from_tensors(["pair"] * 2, None, "2", False), "2 payloads"),
        (
            lambda: updater.from_tensors(["none"], None, "2", False),
            r"wanted a list of \(name, tensor\) pairs",
        ),
        (lambda: updater.from_tensors(["gone"], None, "2", False), "serialized_named_tensors: 'gone'"),
        (lambda: updater.from_group("g", [], None, "2", False), "group 'g' does not exist"),
        (lambda: updater.from_disk(str(tmp_path / "no"), "2", True), "no such directory on the engine's"),
    ]

    def check(case):
        with pytest.raises(BadRequest, match=case[1]):
            case[0]()

    hold_each(cases, check)
    updater.begin("all")
    hold_each(opened, check)
    engine.released = {"weights"}
    for call, _ in opened[:1] + opened[-1:] + cases:
        with pytest.raises(BadRequest, match="memory of the weights is released: /resume_memory_occupation"):
            call()
    assert not weights.update.called and engine.scheduler.weight_version == "1" and not engine.flush.called


def test_weights_from_a_disk_need_no_session_and_the_old_ones_are_kept(parts, monkeypatch, tmp_path):
    engine, weights, updater = parts
    loaded = MagicMock()
    monkeypatch.setattr(weight_updater, "load_checkpoint", loaded)
    updater.from_disk(str(tmp_path), "2", False)
    loaded.assert_called_once_with(weights, str(tmp_path))
    assert engine.scheduler.weight_version == "2"
    loaded.side_effect = ValueError("does not fit")
    with pytest.raises(BadRequest, match="does not fit; the old weights are kept"):
        updater.from_disk(str(tmp_path), "3", False)
    assert engine.scheduler.weight_version == "2" and engine.updating is False


@pytest.mark.parametrize("in_session", [False, True])
def test_after_a_checkpoint_that_broke_off_nothing_is_computed_until_all_weights_have_come(
    parts, payload, monkeypatch, tmp_path, in_session
):
    engine, weights, updater = parts
    weights.named = {"w": weights.place, "x": weights.place}
    loaded = MagicMock(side_effect=TornWeights("ends before byte 7"))
    monkeypatch.setattr(weight_updater, "load_checkpoint", loaded)
    if in_session:
        updater.begin("all")
    with pytest.raises(
        BadRequest, match="ends before byte 7; nothing is computed until all weights come anew"
    ):
        updater.from_disk(str(tmp_path), "2", False)
    assert engine.updating is True and engine.scheduler.weight_version == "1"
    if not in_session:
        updater.begin("all")
    updater.from_tensors(["pair"], None, "2", False)
    with pytest.raises(BadRequest, match="weight 'x': may be of a checkpoint that broke off"):
        updater.end()
    assert engine.updating is True and updater.session is None
    loaded.side_effect = None
    updater.from_disk(str(tmp_path), "3", False)
    assert engine.updating is False
    updater.begin("all")
    updater.from_disk(str(tmp_path), "4", False)
    assert engine.updating is True
    updater.end()
    assert engine.updating is False


@pytest.mark.parametrize("load_format", [None, "flattened_bucket"])
def test_weights_that_a_group_brings_replace_those_that_broke_off(parts, monkeypatch, tmp_path, load_format):
    engine, weights, updater = parts
    weights.named = {"w": weights.place}
    monkeypatch.setattr(weight_updater, "load_checkpoint", MagicMock(side_effect=TornWeights("broke off")))
    updater.groups = MagicMock(
        device=lambda name: CPU, buffers=lambda name, size: [torch.empty(size, dtype=torch.uint8)]
    )
    with pytest.raises(BadRequest, match="broke off"):
        updater.from_disk(str(tmp_path), "2", False)
    updater.begin("all")
    updater.from_group("g", [("w", torch.float32, (2,))], load_format, "2", False)
    updater.end()
    assert engine.updating is False


@pytest.mark.parametrize("load_format", [None, "direct", "flattened_bucket"])
def test_a_group_brings_the_tensors_that_were_announced(parts, load_format):
    _, weights, updater = parts
    updater.groups = MagicMock(
        device=lambda name: CPU, buffers=lambda name, size: [torch.empty(size, dtype=torch.uint8)]
    )
    sent = {"w": torch.tensor([1.0, 2.0]), "x": torch.tensor([[3], [4]], dtype=torch.int8)}
    bucket = FlattenedTensorBucket(named_tensors=list(sent.items())).flattened_tensor
    given = [bucket] if load_format == "flattened_bucket" else list(sent.values())

    def receive(name, ranks):
        (tensors,) = ranks
        assert name == "g" and [t.dtype for t in tensors] == [t.dtype for t in given]
        for tensor, value in zip(tensors, given, strict=True):
            tensor.copy_(value)

    updater.groups.receive = receive
    updater.begin("all")
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()]
    updater.from_group("g", specs, load_format, "2", False)
    found = dict(weights.update.call_args.args[0])
    if load_format != "flattened_bucket":  # it lies in its place already
        assert "w" not in found
        found["w"] = weights.place
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [1.0, 2.0], "x": [[3], [4]]}
    given.clear()
    if load_format != "flattened_bucket":
        updater.from_group("g", [], load_format, "3", False)
        assert weights.update.call_args.args[0] == []


PLACES = {
    "fits": torch.zeros(2, 2),
    "of another format": torch.zeros(2, 2, dtype=torch.bfloat16),
    "not in a row": torch.zeros(2, 2).T,
    "elsewhere": torch.zeros(2, 2, device="meta"),
    "nowhere": None,
}


@pytest.mark.parametrize("kind", ["plain", "quantised", "of two ranks"])
def test_what_fits_is_received_where_it_belongs_and_the_rest_is_copied_there(kind):
    engine, weights = MagicMock(released=set()), weights_of_a_model()
    weights.destination = lambda name, shape, dtype: PLACES[name]
    stored = SimpleNamespace(spec=lambda name: None, decode=lambda named: named)
    updater = WeightUpdater(
        engine, weights, stored if kind == "quantised" else None, 2 if kind == "of two ranks" else 1
    )
    received = []
    updater.groups = MagicMock(device=lambda name: CPU, receive=lambda name, ranks: received.extend(ranks))
    updater.begin("all")
    updater.from_group("g", [(name, torch.float32, (2, 2)) for name in PLACES], None, "2", False)
    copied = [name for name, _ in weights.update.call_args.args[0]]
    assert copied == [name for name in PLACES if name != "fits" or kind != "plain"]
    for tensors in received:
        held = [any(tensor is place for place in PLACES.values()) for tensor in tensors]
        assert held == [name not in copied for name in PLACES]
        assert [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == [(torch.float32, (2, 2))] * 5


@pytest.mark.parametrize(
    ("names", "at_once"),
    [("ab", True), ("b", True), ("ba", False), ("bc", False), ("aa", False), ("", False)],
)
def test_a_bucket_of_weights_that_lie_in_its_order_is_received_into_them(names, at_once):
    engine, weights, memory = MagicMock(released=set()), weights_of_a_model(), torch.zeros(12)
    places = {"a": memory[1:3], "b": memory[3:7], "c": memory[8:10]}
    weights.flat, weights.destination = memory, lambda name, shape, dtype: places[name]
    updater, received = WeightUpdater(engine, weights), []
    updater._torn = {"a", "d"}
    updater.groups = MagicMock(device=lambda name: CPU, receive=lambda name, ranks: received.extend(ranks))
    updater.groups.buffers = lambda name, size: [torch.empty(size, dtype=torch.uint8)]
    updater.begin("all")
    specs = [(name, torch.float32, tuple(places[name].shape)) for name in names]
    updater.from_group("g", specs, "flattened_bucket", None, False)
    ((flat,),) = received
    assert flat.dtype == torch.uint8 and flat.numel() == sum(places[name].nbytes for name in names)
    copied = [name for name, _ in weights.update.call_args.args[0]]
    assert copied == ([] if at_once else [*names])
    if at_once:
        assert flat.data_ptr() == places[names[0]].data_ptr()
        assert updater._torn == {"a", "d"} - {*names}


@pytest.mark.parametrize(("size", "taken"), [(12, True), (13, False)])
def test_what_has_no_place_is_received_up_to_twice_the_embedding(parts, size, taken):
    _, weights, updater = parts
    updater.groups = MagicMock(
        device=lambda name: CPU, buffers=lambda name, size: [torch.empty(size, dtype=torch.uint8)]
    )
    updater.begin("all")
    specs = [("unknown", torch.float32, (size,)), ("w", torch.float32, (2,))]
    if taken:
        updater.from_group("g", specs, None, "2", False)
    else:
        with pytest.raises(BadRequest, match=r"weight 'unknown': shape \[13\] does not belong to this model"):
            updater.from_group("g", specs, None, "2", False)
    assert weights.update.called is taken
    large = WeightUpdater(MagicMock(released=set()), weights_of_a_model())
    place = torch.zeros(99, dtype=torch.int8)
    large._parameters.destination = lambda name, *form: {("w", (99,), torch.int8): place}.get((name, *form))
    large._check("w", torch.int8, (99,))  # it has a place, whatever its size


@pytest.mark.parametrize(("name", "size"), [("unknown", 13), ("w", 2)])
def test_changes_are_received_where_there_is_a_place_for_them(parts, name, size):
    """An engine that waits for bytes which nobody has announced otherwise stands still until a time limit."""
    _, weights, updater = parts
    updater.groups, data = MagicMock(), torch.zeros(size)
    updater.groups.buffers.return_value = [data.view(torch.uint8)]
    updater.begin("all")
    digest = checksum("xxh3-128", bytes_in(data))
    tensor = SentTensor(name, "float32", (size,), "whole", data.nbytes, digest)
    bucket = ChangedBucket([tensor], "xxh3-128", 0)
    if name == "w":
        updater.from_changes("g", bucket, None, False)
    else:
        with pytest.raises(BadRequest, match=r"weight 'unknown': shape \[13\] does not belong to this model"):
            updater.from_changes("g", bucket, None, False)
    assert updater.groups.receive.called is weights.update.called is (name == "w")


def test_quantised_weights_come_in_the_format_of_their_checkpoint(parts):
    engine, weights, _ = parts
    given, packed = torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.int8)
    stored = SimpleNamespace(
        spec=lambda name: (torch.int8, (2,)) if name == "q" else None,
        decode=lambda named: [("b", given), ("q", torch.ones(2, dtype=torch.float64))],
    )
    updater = WeightUpdater(engine, weights, stored)
    updater.groups = MagicMock(
        device=lambda name: CPU, buffers=lambda name, size: [torch.empty(size, dtype=torch.uint8)]
    )
    updater.begin("all")
    updater._load([("b", given), ("q", packed)])
    (b, q) = weights.update.call_args.args[0]
    assert b[1] is given and q[1].dtype == torch.float32
    for spec in (("q", torch.int8, (3,)), ("q", torch.float32, (2,))):
        with pytest.raises(BadRequest, match=r"weight 'q': .* \(wanted: torch.int8 \[2\]\)"):
            updater.from_group("g", [spec], None, "2", False)
    stored.decode = MagicMock(side_effect=ValueError("half of a weight"))
    with pytest.raises(BadRequest, match="half of a weight"):
        updater._load([("q", packed)])


def test_only_pairs_of_name_and_tensor_are_tensors():
    one = torch.ones(2)
    assert named_tensors([["w", one]], None) == [("w", one)]
    for payload in ([("w", 1)], [(1, one)], [("w",)], 5):
        with pytest.raises((TypeError, ValueError)):
            named_tensors(payload, None)


ALL = {"kv_cache", "weights", "cuda_graph"}


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("tags", [None, ["weights"], ["kv_cache"], ["cuda_graph"]])
def test_memory_is_given_back_by_tag_and_taken_again(parts, monkeypatch, enabled, keeps, tags):
    engine, weights, _ = parts
    emptied = MagicMock()
    monkeypatch.setattr(memory_occupation, "empty_cache", emptied)
    memory, chosen = MemoryOccupation(engine, weights, enabled, keeps), set(tags or ALL)
    memory.release(tags)
    assert engine.released == chosen and emptied.called is enabled
    assert engine.cache.clear.called is (enabled and "kv_cache" in chosen)
    wanted = [((keeps,), {})] if enabled and "weights" in chosen else []
    assert [tuple(call) for call in weights.release.call_args_list] == wanted
    memory.release(tags)  # once more: there is nothing left to give
    assert len(weights.release.call_args_list) == len(wanted)
    memory.resume(tags)
    assert engine.released == set() and weights.resume.called is bool(wanted)


def test_weights_of_which_nothing_was_kept_are_zero_when_their_memory_comes_back(monkeypatch):
    """Whatever is in it then."""
    weights = NamedWeights(SimpleNamespace(shape=SimpleNamespace(model_type="qwen3")))
    weights.flat = torch.ones(4)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda storage, size: storage)
    for keeps, left in ((True, 1.0), (False, 0.0)):
        weights.release(keep_backup=keeps)
        weights.flat.fill_(5)
        weights.resume()
        assert weights.flat.tolist() == [left] * 4


def test_memory_that_is_in_use_or_was_not_given_back_is_left_alone(parts):
    engine, weights, _ = parts
    memory = MemoryOccupation(engine, weights, True, True)
    with pytest.raises(BadRequest, match="not released, so there is nothing to resume"):
        memory.resume(None)
    engine.scheduler.live = ["request"]
    with pytest.raises(BadRequest, match="cannot be released while requests are running or queued"):
        memory.release(None)
    assert engine.released == set() and not weights.release.called
    engine.scheduler.live = []
    for call in (memory.release, memory.resume):
        with pytest.raises(
            BadRequest, match=r"tags \['heap'\]: wanted some of kv_cache, weights, cuda_graph"
        ):
            call(["heap", "weights"])
    memory.release(["weights"])
    with pytest.raises(BadRequest, match=r"tags \['kv_cache'\]: not released"):
        memory.resume(["kv_cache", "weights"])
    memory.release(None)
    memory.resume(["weights"])
    assert engine.released == {"kv_cache", "cuda_graph"}
    memory.resume([])
    assert engine.released == set()
