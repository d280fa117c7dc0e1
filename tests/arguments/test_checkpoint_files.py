"""Files of a checkpoint that cannot be loaded are found before anything starts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from slime.arguments import validated_args
from slime.arguments.groups.critic import of_critic
from slime.arguments.validate.checkpoint_files import CHECKPOINT_MARKER, newest_whole
from slime.utils import checkpoint_record
from slime.utils.checkpoint_record import write_record


@pytest.mark.parametrize("flag", ["load", "ref_load"])
@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("release", "says 'release', which is missing or incomplete"),
        ("", "says '' (wanted: the number of an iteration)"),
        ("three", "says 'three' (wanted: the number of an iteration)"),
        ("-3", "says '-3' (wanted: the number of an iteration)"),
        ("9" * 5000, "says '999"),
        ("7", "iter_0000007 is missing or incomplete (complete ones: iter_0000001, iter_0000003)"),
    ],
)
def test_a_broken_marker_is_refused(words, refusal, own_checkpoint, flag, marker, said):
    (own_checkpoint / CHECKPOINT_MARKER).write_text(marker)
    message = refusal(words(**{flag: own_checkpoint}))
    assert message.startswith(f"--{flag.replace('_', '-')} {own_checkpoint}: ")
    assert said in message


def test_an_incomplete_iteration_is_refused(words, refusal, own_checkpoint):
    (own_checkpoint / "iter_0000003/metadata.json").unlink()
    assert refusal(words(load=own_checkpoint)).endswith("missing or incomplete (complete ones: iter_0000001)")


@pytest.mark.parametrize(("flag", "step"), [("load", "ckpt_step"), ("ref_load", "ref_ckpt_step")])
def test_a_chosen_iteration_must_be_there(words, refusal, own_checkpoint, flag, step):
    validated_args(words(**{flag: own_checkpoint, step: 1}))
    assert "iter_0000002 is missing" in refusal(words(**{flag: own_checkpoint, step: 2}))


def test_a_step_of_no_checkpoint_is_refused(words, refusal, tmp_path):
    assert refusal(words(load=tmp_path / "none", ckpt_step=3)).startswith(
        "--ckpt-step 3: there is no checkpoint"
    )


def cut(path):
    save_file({"a": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x00" * 100),
        lambda path: path.write_bytes((10**12).to_bytes(8, "little") + b"{}"),
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\n"),
        cut,
    ],
    ids=["empty", "zeros", "huge header", "git-lfs pointer", "truncated"],
)
@pytest.mark.parametrize("flag", ["hf_checkpoint", "ref_load", "load"])
def test_a_broken_safetensors_file_is_refused(words, refusal, altered_checkpoint, flag, spoil):
    path = altered_checkpoint()
    spoil(path / "model.safetensors")
    message = refusal(words(**{flag: path}))
    assert message.startswith(
        f"--{flag.replace('_', '-')}: {path}/model.safetensors: not a readable safetensors"
    )


def test_a_missing_tensor_is_named(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    save_file({"model.norm.weight": torch.empty(0)}, path / "model.safetensors")
    message = refusal(words(hf_checkpoint=path))
    assert message.startswith(f"--hf-checkpoint {path}: ")
    assert "tensors of config.json are missing, e.g. model.embed_tokens.weight" in message


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": 5}', "weight_map is 5"),
        ('{"weight_map": {}}', "weight_map is {}"),
        ('{"weight_map": {"a": 5}}', "weight_map is {'a': 5}"),
        ('{"weight_map": {"a": "b.safetensors"}}', "names files that do not exist: b.safetensors"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "'../b.safetensors' is not a file of that directory"),
        (
            '{"weight_map": {"a": "model.safetensors"}}',
            "no tensor 'a', but model.safetensors.index.json says",
        ),
    ],
)
def test_a_broken_index_is_refused(words, refusal, altered_checkpoint, index, said):
    path = altered_checkpoint()
    (path / "model.safetensors.index.json").write_text(index)
    message = refusal(words(hf_checkpoint=path))
    assert message.startswith(f"--hf-checkpoint: {path}/model.safetensors")
    assert said in message


def test_a_hugging_face_directory_without_weights_is_no_checkpoint(words, refusal, altered_checkpoint):
    path = altered_checkpoint()
    (path / "model.safetensors").unlink()
    assert refusal(words(ref_load=path)) == f"--ref-load {path}: holds no .safetensors file"
    assert refusal(words(load=path)) == f"--load {path}: holds no .safetensors file"


def test_weights_may_come_from_elsewhere(words, own_checkpoint, altered_checkpoint):
    path = altered_checkpoint()
    (path / "model.safetensors").unlink()
    validated_args(words(hf_checkpoint=path, load=own_checkpoint))


def test_a_reference_of_another_shape_is_refused(words, refusal, altered_checkpoint):
    path = altered_checkpoint(intermediate_size=512)
    assert refusal(words(ref_load=path)) == (
        f"--ref-load {path}: is another model than --hf-checkpoint: its ffn_hidden_size is 512 (wanted: 256)"
    )
    (path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "model_type 'gpt2' is not supported" in refusal(words(ref_load=path))


def test_a_conversion_named_after_the_model_stands_for_it(words, notes, checkpoint, tmp_path):
    path = tmp_path / f"{checkpoint.name}_torch_dist"
    path.mkdir()
    (path / CHECKPOINT_MARKER).write_text("release")
    line = words(ref_load=path)
    assert validated_args(line).ref_load is None
    (note,) = notes(line)
    assert note.startswith(f"--ref-load {path}: says that a converter wrote it, and holds no weights")
    assert note.endswith("those of --hf-checkpoint are used, after which it is named")


def test_a_chosen_iteration_of_a_conversion_is_refused(words, refusal, checkpoint, tmp_path):
    path = tmp_path / f"{checkpoint.name}_torch_dist"
    path.mkdir()
    (path / CHECKPOINT_MARKER).write_text("release")
    assert "iter_0000003 is missing" in refusal(words(ref_load=path, ref_ckpt_step=3))
    assert "says 'release'" in refusal(words(load=path))


def test_the_weights_of_a_conversion_begin_a_run(words, notes, checkpoint, tmp_path):
    path = tmp_path / f"{checkpoint.name}_torch_dist"
    (path / "release").mkdir(parents=True)
    (path / "release/metadata.json").write_text("{}")
    (path / CHECKPOINT_MARKER).write_text("release")
    args = validated_args(words(ref_load=path, load=path))
    assert (args.ref_load, args.load) == (str(path), str(path))
    assert (args.finetune, args.no_load_optim, args.start_rollout_id) == (True, True, 0)
    assert notes(words(ref_load=path, load=path)) == []


@pytest.fixture
def recorded(own_checkpoint):
    """Iterations 1 and 3, with records of what they hold."""
    for iteration in (1, 3):
        write_record(own_checkpoint / f"iter_000000{iteration}", 0, 1)
    return own_checkpoint


def cut_metadata(root, *iterations, content="{"):
    for iteration in iterations:
        (root / f"iter_000000{iteration}/metadata.json").write_text(content)


def test_a_whole_checkpoint_is_loaded(words, notes, recorded):
    assert notes(words(load=recorded)) == []
    assert validated_args(words(load=recorded)).ckpt_step is None


def test_of_a_damaged_checkpoint_the_newest_whole_iteration_is_loaded(words, notes, recorded):
    cut_metadata(recorded, 3)
    reason = "iter_0000003: metadata.json has 1 bytes (wanted: 2)"
    assert notes(words(load=recorded)) == [f"--load {recorded}: {reason}: iteration 1 is loaded"]
    args = validated_args(words(load=recorded))
    assert args.ckpt_step == 1 and not args.finetune


def test_an_iteration_after_the_marked_one_is_not_loaded(words, recorded):
    (recorded / CHECKPOINT_MARKER).write_text("1")
    assert validated_args(words(load=recorded)).ckpt_step is None


def test_a_checkpoint_without_a_whole_iteration_is_refused(words, refusal, recorded):
    cut_metadata(recorded, 1, 3)
    reason = "iter_0000003: metadata.json has 1 bytes (wanted: 2)"
    assert refusal(words(load=recorded)).startswith(f"--load {recorded}: {reason} (wanted: a complete copy")
    assert validated_args(words(load=recorded, verify_checkpoint="none")).ckpt_step is None


@pytest.mark.parametrize(("flag", "step"), [("load", "ckpt_step"), ("ref_load", "ref_ckpt_step")])
def test_a_chosen_iteration_must_be_whole(words, refusal, recorded, flag, step):
    cut_metadata(recorded, 3)
    assert "metadata.json has 1 bytes" in refusal(words(**{flag: recorded, step: 3}))
    validated_args(words(**{flag: recorded, step: 1}))


def test_other_content_of_the_same_size_is_found_by_checksums(words, recorded):
    cut_metadata(recorded, 3, content="[]")
    assert validated_args(words(load=recorded)).ckpt_step is None
    assert validated_args(words(load=recorded, verify_checkpoint="checksums")).ckpt_step == 1


def test_a_critic_and_its_actor_go_on_at_the_newest_iteration_that_is_whole_for_both(words, recorded):
    shutil.copytree(recorded, recorded / "critic")
    ppo = dict(load=recorded, save=recorded, save_interval=1, advantage_estimator="ppo")
    assert validated_args(words(**ppo)).ckpt_step is None
    cut_metadata(recorded / "critic", 3)
    args = validated_args(words(**ppo))
    assert args.critic_resumes and args.ckpt_step == 1
    cut_metadata(recorded / "critic", 3, content="{}")
    cut_metadata(recorded, 3)
    args = validated_args(words(**ppo))
    assert args.critic_resumes and args.ckpt_step == 1


@pytest.fixture
def ppo(recorded):
    """Iterations 1, 2 and 3 of an actor and its critic, and the flags that go on from them."""
    shutil.copytree(recorded / "iter_0000001", recorded / "iter_0000002")
    shutil.copytree(recorded, recorded / "critic")
    return dict(load=recorded, save=recorded, save_interval=1, advantage_estimator="ppo")


def test_a_chosen_iteration_is_loaded_although_a_newer_one_is_damaged(words, recorded, ppo):
    cut_metadata(recorded, 3)
    assert validated_args(words(**ppo)).ckpt_step == 2
    assert validated_args(words(**ppo, ckpt_step=1)).ckpt_step == 1


def test_what_is_whole_for_one_role_alone_is_not_gone_on_from(words, recorded, ppo):
    cut_metadata(recorded, 3)
    cut_metadata(recorded / "critic", 2)
    assert validated_args(words(**ppo)).ckpt_step == 1


def test_a_critic_whose_newest_iteration_is_damaged_and_has_no_actor(words, notes, recorded, ppo):
    (recorded / CHECKPOINT_MARKER).write_text("2")
    cut_metadata(recorded / "critic", 3)
    args = validated_args(words(**ppo))
    assert args.critic_resumes and of_critic(args).ckpt_step == 2
    reason = "iter_0000003: metadata.json has 1 bytes (wanted: 2)"
    assert notes(words(**ppo)) == [f"--critic-load {recorded}/critic: {reason}: iteration 2 is loaded"]


def test_a_new_critic_starts_with_the_iteration_that_its_actor_goes_on_from(words, recorded, ppo):
    shutil.rmtree(recorded / "critic")
    cut_metadata(recorded, 3)
    critic = of_critic(validated_args(words(**ppo)))
    assert (critic.load, critic.ckpt_step, critic.finetune) == (str(recorded), 2, True)


def test_of_two_roles_only_the_one_without_a_whole_iteration_is_refused(words, refusal, recorded, ppo):
    """The actor goes back; its critic would be loaded at the same iteration, and cannot."""
    cut_metadata(recorded, 3)
    cut_metadata(recorded / "critic", 1, 2, 3)
    assert newest_whole(recorded / "critic", "sizes")[0] is None
    reason = "iter_0000002: metadata.json has 1 bytes (wanted: 2)"
    assert refusal(words(**ppo)).startswith(f"--critic-load {recorded}/critic: {reason}")


def test_files_are_read_once(words, notes, recorded, monkeypatch):
    read = []
    checksum = checkpoint_record._checksum
    monkeypatch.setattr(checkpoint_record, "_checksum", lambda path: read.append(path) or checksum(path))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # paths are made absolute meanwhile
    monkeypatch.chdir(recorded.parent)
    notes(words(load=recorded.name, verify_checkpoint="checksums"))
    assert [path.name for path in read] == ["metadata.json"]


def test_an_iteration_that_cannot_be_read_is_damaged(words, notes, recorded):
    unreadable = recorded / "iter_0000003/__0_0.distcp"
    unreadable.touch()
    unreadable.with_name(".metadata").touch()
    write_record(unreadable.parent, 0, 1)
    unreadable.unlink()
    unreadable.symlink_to("/proc/self/mem")  # no bytes, and an I/O error for who reads
    line = words(load=recorded, verify_checkpoint="checksums")
    (note,) = notes(line)
    assert "iter_0000003: __0_0.distcp cannot be read (Input/output error): iteration 1 is loaded" in note
    assert validated_args(line).ckpt_step == 1
