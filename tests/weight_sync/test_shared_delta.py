"""Changes that trainer ranks find and write together: bit for bit those of one, or a failure of all."""

import copy

import pytest
from fastapi.responses import JSONResponse

from slime.training.weights import TensorInfo
from slime.utils.tensor_bucket import tensor_digest
from slime.weight_sync.split import split
from slime.weight_sync.versions.local import pull
from slime.weight_sync.versions.manifest import VersionManifest, directory_of
from tests.megatron_harness import run_ranks
from tests.weight_sync.shared_trainer import FORMS, files_of, run, weights_after
from tests.weight_sync.test_delta import Puller, args_of, kinds, read, require_equal

GOOD = ((), None)


class Noting(Puller):
    """Keeps what it has loaded, by version."""

    def load(self, body):
        answer = super().load(body)
        self.by_version = {
            **getattr(self, "by_version", {}),
            body["weight_version"]: copy.deepcopy(self.loaded),
        }
        return answer


@pytest.fixture
def root(tmp_path):
    return tmp_path / "versions"


@pytest.fixture
def args(tmp_path, root):
    return args_of(tmp_path, root)


@pytest.fixture
def engine(tmp_path):
    engine = Noting(tmp_path / "machine")
    engine.start()
    yield engine
    engine.stop()


def made(args, engine, *plan, ranks=4):
    """What ranks told of updates; those that did not fail have brought an engine what they were to."""
    told = run_ranks(run, ranks, args, engine.url, plan)
    for number, weights in enumerate(weights_after(len(plan)), start=1):
        failed = [one[number - 1]["error"] is not None for one in told]
        assert all(failed) or not any(failed), told
        if not failed[0]:
            require_equal(engine.by_version[str(number)], weights)
    return told


def errors(told, number):
    return [one[number - 1]["error"] for one in told]


def test_each_rank_keeps_and_writes_its_part_of_its_own_stage(args, engine, root):
    args.update_weight_disk_keep_files = True
    told = made(args, engine, GOOD, GOOD, GOOD)
    assert kinds(root) == {1: True, 2: False, 3: False}
    held = [one[-1]["held"] for one in told]
    assert sorted(name for one in held for name in one) == sorted(FORMS)  # each once
    for rank, names in enumerate(held):
        assert {FORMS[name][2] for name in names} == {rank // 2}
    total = sum(sum(one.values()) for one in held)
    assert max(sum(one.values()) for one in held) < 0.35 * total
    assert all(one[-1]["asked"] == [] for one in told)  # nothing crossed stages
    for version in (1, 2, 3):
        written = VersionManifest.read(directory_of(root, version)).tensors
        owners = {next(rank for rank, names in enumerate(held) if name in names): set() for name in written}
        for name, entry in written.items():
            owners[next(rank for rank, names in enumerate(held) if name in names)].add(entry.file)
        assert set(owners) == {0, 1, 2, 3}
        assert len(files_of(directory_of(root, version))) == sum(map(len, owners.values()))  # none is shared
    assert sum(one[0]["sent"] for one in told) == total
    assert 0 < told[0][-1]["density"] < 1 and {one[-1]["density"] for one in told[1:]} == {0.0}


def test_they_write_what_one_rank_writes(args, engine, root, tmp_path):
    args.update_weight_disk_keep_files = True
    made(args, engine, GOOD, GOOD, ranks=4)
    found = {version: VersionManifest.read(directory_of(root, version)) for version in (1, 2)}
    args.update_weight_disk_dir = str(tmp_path / "alone")
    made(args, engine, GOOD, GOOD, ranks=1)
    for version, manifest in found.items():
        alone = VersionManifest.read(directory_of(tmp_path / "alone", version))
        assert (manifest.link, manifest.base) == (alone.link, alone.base)
        pairs = [{n: e._replace(file="") for n, e in one.tensors.items()} for one in (manifest, alone)]
        assert pairs[0] == pairs[1]
        require_equal(read(directory_of(root, version)), read(directory_of(tmp_path / "alone", version)))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_fails_on_all_and_the_next_version_builds_on_what_engines_have(
    args, engine, root, rank
):
    args.update_weight_disk_keep_files = True
    faults = ["a full disk", "a file that is read otherwise", "no memory for changes"]
    told = made(args, engine, GOOD, *(((rank,), what) for what in faults), GOOD)
    wanted = ["No space left on device", "is read (wanted", "MemoryError: of this rank"]
    for number, (what, text) in enumerate(zip(faults, wanted, strict=True), start=2):
        own = errors(told, number)
        assert text in own[rank], (what, own)
        for other, error in enumerate(own):
            assert other == rank or f"rank {rank} failed: " in error, (what, own)
    assert kinds(root) == {1: True, 5: False}
    assert VersionManifest.read(directory_of(root, 5)).base.version == 1


def test_ranks_that_hold_different_versions_write_a_whole_one(args, engine, root):
    """One has failed to move its base on when engines had the version."""
    args.update_weight_disk_keep_files = True
    told = made(args, engine, GOOD, ((3,), "no memory for the base"), GOOD, GOOD)
    assert "MemoryError: of this rank" in errors(told, 2)[3] and "rank 3 failed: " in errors(told, 2)[0]
    assert [one[1]["link"] is None for one in told] == [False, False, False, True]
    assert kinds(root) == {1: True, 2: False, 3: True, 4: False}


def test_the_base_of_no_rank_moves_on_before_engines_confirm(args, engine, root):
    args.update_weight_disk_keep_files = True
    loading = engine.answers["update_weights_from_disk"]

    def refuse_the_second(body):
        is_second = body["weight_version"] == "2"
        return JSONResponse({"success": False}, status_code=400) if is_second else loading(body)

    engine.answers["update_weights_from_disk"] = refuse_the_second
    told = made(args, engine, GOOD, GOOD, GOOD)
    assert "HTTP 400" in errors(told, 2)[0] and all("rank 0 failed: " in e for e in errors(told, 2)[1:])
    assert [one[1]["link"] for one in told] == [[*VersionManifest.read(directory_of(root, 1)).link]] * 4
    assert VersionManifest.read(directory_of(root, 3)).base.version == 1


def test_all_ranks_write_a_whole_version_where_a_reader_lacks_a_link_and_after_many(args, engine, root):
    args.update_weight_disk_keep_files = True
    pulling, refused = engine.answers["pull_weights"], []

    def refuse_changes_of_the_third(body):
        if body["target_version"] == 3 and not refused:
            refused.append(body)
            return JSONResponse({"message": "no link"}, status_code=400)
        return pulling(body)

    engine.answers["pull_weights"] = refuse_changes_of_the_third
    few = ((0, 1, 2, 3), "few links")
    told = made(args, engine, few, few, few, few, few, few)
    assert refused and kinds(root) == {1: True, 2: False, 3: True, 4: False, 5: True, 6: False}
    assert len(files_of(directory_of(root, 3))) >= 4 and len(files_of(directory_of(root, 5))) >= 4
    assert errors(told, 6) == [None] * 4
    require_equal(read(pull(root, root.parent / "late", 6)), weights_after(6)[-1])


def test_what_ranks_held_is_given_up_where_others_write_from_then_on(args, engine, root):
    args.update_weight_disk_keep_files = True
    told = made(args, engine, GOOD, ((1,), "a full disk"), ((1,), "no directory"), GOOD)
    assert kinds(root) == {1: True, 3: True, 4: False}
    assert [len(one[0]["held"]) > 0 for one in told] == [True] * 4
    assert [len(one[-1]["held"]) for one in told] == [len(FORMS), 0, 0, 0]


@pytest.mark.parametrize("what", ["no directory", "a directory that cannot be read"])
def test_rank_0_writes_all_where_another_one_does_not_reach_the_directory(args, engine, root, what):
    told = made(args, engine, ((1,), what), GOOD)
    assert kinds(root)[2] is False
    assert [one[-1]["sources"] for one in told] == [[0]] * 4
    assert [set(one[-1]["held"]) for one in told] == [set(FORMS), set(), set(), set()]


def test_what_ranks_have_sent_together_is_held_against_what_engines_say(args, engine):
    args.check_weight_checksums = True

    def told(_body):
        held = engine.loaded
        if engine.weight_version == "2":
            held = held | {"wide1": held["wide1"] + 1}  # of rank 1
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in held.items()}
        checksums = {name: tensor_digest(tensor) for name, tensor in held.items()}
        return {"ranks": [{"checksums": checksums, "dtypes": dtypes}]}

    engine.answers["weights_checker"] = told
    found = made(args, engine, GOOD, GOOD, ranks=2)
    assert errors(found, 1) == [None] * 2
    assert "weight 'wide1': checksum" in errors(found, 2)[0] and "as sent" in errors(found, 2)[1]


def test_what_a_rank_has_sent_before_another_one_writes_all_counts_no_more(args, engine):
    args.check_weight_checksums = True

    def told(_body):
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in engine.loaded.items()}
        checksums = {name: tensor_digest(tensor) for name, tensor in engine.loaded.items()}
        return {"ranks": [{"checksums": checksums, "dtypes": dtypes}]}

    engine.answers["weights_checker"] = told
    found = made(args, engine, GOOD, ((1,), "a full disk"), ((1,), "no directory"), ranks=2)
    assert [one[2]["sources"] for one in found] == [[0]] * 2
    assert errors(found, 3) == [None] * 2


def test_ranks_share_their_stage_by_bytes_and_pairs_stay_together():
    dtype, pair = FORMS["narrow0"][0], ["a.q_a_proj.weight", "a.kv_a_proj_with_mqa.weight"]
    sizes = (9, 1, 1, 5, 8, 4)
    tensors = [TensorInfo(f"t{at}", (size,), dtype, owner=at % 2) for at, size in enumerate(sizes)]
    tensors += [TensorInfo(name, (size,), dtype, owner=1) for name, size in zip(pair, (4, 2), strict=True)]
    names = split(tensors, [0, 0, 1, 1, 1])
    assert names == [{"t0"}, {"t2", "t4"}, {"t1", *pair}, {"t3"}, {"t5"}]
    assert split(tensors[:1], [0, 0, 0]) == [{"t0"}, frozenset(), frozenset()]


def test_ranks_publish_together_for_followers_of_others(args, root, tmp_path):
    args.update_weight_local_checkpoint_dir, args.publish_weights = None, True
    told = run_ranks(run, 2, args, None, [GOOD] * 3)
    assert kinds(root) == {1: True, 2: False, 3: False} and errors(told, 3) == [None] * 2
    for number, weights in enumerate(weights_after(3), start=1):
        require_equal(read(pull(root, tmp_path / "follower", number)), weights)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_object_store_takes_files_of_all_ranks(args, engine, root, ranks):
    args.update_weight_disk_dir = f"file://{root}"
    told = made(args, engine, GOOD, GOOD, ranks=ranks)
    assert [one[-1]["sources"] for one in told] == [[*range(ranks)]] * ranks
    (own,) = root.glob("trainer_*")
    assert kinds(own) == {1: True, 2: False}
    names = {entry.file for entry in VersionManifest.read(directory_of(own, 1)).tensors.values()}
    assert names == files_of(directory_of(own, 1))
