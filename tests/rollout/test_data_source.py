import json
from pathlib import Path

import numpy as np
import pytest
import torch

from slime.rollout.data_source import (
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    pop_first,
    rollouts_of_run,
    rollouts_per_epoch,
)
from slime.rollout.data_state import state_path
from slime.rollout.ledger import RolloutAccount
from slime.utils.types import Sample
from tests.run_args import config_with


def prompts(groups):
    return [group[0].label for group in groups]


def test_groups_are_copies_with_running_numbers(make_args):
    source = RolloutDataSource(make_args())
    first, second = source.get_samples(2)
    assert [(s.group_index, s.index) for s in first + second] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    first[0].metadata["mine"] = True
    assert "mine" not in first[1].metadata
    assert len(source) == 20


def test_hooks_know_how_many_rollouts_the_epochs_make(make_args):
    args = make_args(num_rollout=None, num_epoch=3, rollout_batch_size=8)
    assert RolloutDataSource(args).args.num_rollout == 6
    assert args.num_rollout is None
    assert RolloutDataSource(make_args(num_rollout=5)).args.num_rollout == 5


@pytest.mark.parametrize(
    ("flags", "prompts", "per_epoch", "of_run"),
    [
        (dict(num_rollout=None, num_epoch=3), 20, 2, 6),
        (dict(num_rollout=None, num_epoch=3), 8, 1, 3),
        (dict(num_rollout=None, num_epoch=3), 7, None, None),
        (dict(num_rollout=None, num_epoch=None), 20, 2, None),
        (dict(num_rollout=5, num_epoch=3), 20, 2, 5),
        (dict(num_rollout=5, num_epoch=3, rollout_global_dataset=False), 20, None, 5),
        (dict(num_rollout=None, num_epoch=3, rollout_global_dataset=False), 20, None, None),
    ],
)
def test_an_epoch_has_as_many_rollouts_as_it_fills(flags, prompts, per_epoch, of_run):
    config = config_with(rollout_batch_size=8, **flags)
    assert rollouts_per_epoch(config, range(prompts)) == per_epoch
    assert rollouts_of_run(config, range(prompts)) == of_run


def test_epochs_follow_one_another_even_within_one_call(make_args):
    source = RolloutDataSource(make_args())
    labels = prompts(source.get_samples(45))
    assert labels == [f"a{i % 20}" for i in range(45)]
    assert (source.epoch_id, source.sample_offset) == (2, 5)


def test_every_epoch_is_a_new_permutation(make_args):
    labels = prompts(RolloutDataSource(make_args(rollout_shuffle=True)).get_samples(40))
    assert sorted(labels[:20]) == sorted(labels[20:]) == sorted(f"a{i}" for i in range(20))
    assert labels[:20] != labels[20:]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("before", [5, 20, 27])
def test_a_restart_goes_on_as_if_nothing_had_happened(make_args, shuffle, before):
    args = make_args(rollout_shuffle=shuffle)
    source = RolloutDataSourceWithBuffer(args)
    account = RolloutAccount(source)
    taken = account.take(before)
    taken[0][0].append_response_tokens(tokens=[5], log_probs=[-1.0], text="x")
    taken[0][0].status = Sample.Status.ABORTED
    taken[0][0].metadata["start_rollout_id"] = 2
    account.give_back([taken[0]])
    for group in taken[1:]:
        account.train(group)
    source.save(2)
    expected = source.get_samples(30)

    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(2)
    assert resumed.get_samples(30) == expected
    assert expected[0][0].response == "x"
    assert resumed.ledger == source.ledger
    assert (resumed.ledger.trained, resumed.ledger.leased) == (before - 1, 30)
    assert resumed.ledger.balanced


def test_a_missing_state_beside_a_checkpoint_is_refused(make_args):
    source = RolloutDataSource(make_args())
    source.load(-1)
    with pytest.raises(ValueError, match=r"--load \S+: has no data state of rollout 4 \(wanted: \S+_4\.pt"):
        source.load(4)
    assert prompts(source.get_samples(1)) == ["a0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_seed": 43}, r"--rollout-seed 43: would .* \(wanted: 42,"),
        ({"rollout_shuffle": False}, r"--rollout-shuffle False: would .* \(wanted: True,"),
    ],
)
def test_another_seed_or_order_is_refused_at_resume(make_args, change, message):
    shuffled = {"rollout_shuffle": True}
    RolloutDataSource(make_args(**shuffled)).save(0)
    with pytest.raises(ValueError, match=message):
        RolloutDataSource(make_args(**shuffled | change)).load(0)


def test_a_seed_that_orders_nothing_may_change_at_resume(make_args):
    source = RolloutDataSource(make_args())
    source.get_samples(3)
    source.save(0)
    resumed = RolloutDataSource(make_args(rollout_seed=43))
    resumed.load(0)
    assert prompts(resumed.get_samples(1)) == ["a3"]
    with pytest.raises(ValueError, match="--rollout-shuffle True"):
        RolloutDataSource(make_args(rollout_shuffle=True)).load(0)


def test_seed_and_shuffle_mean_nothing_without_a_dataset(make_args):
    own = {"rollout_global_dataset": False}
    RolloutDataSource(make_args(**own)).save(0)
    RolloutDataSource(make_args(**own, rollout_seed=43, rollout_shuffle=True)).load(0)


def test_what_is_said_of_a_prompt_may_change_at_resume(make_args, tmp_path):
    args = make_args()
    source = RolloutDataSource(args)
    source.get_samples(3)
    source.save(0)
    mended = tmp_path / "mended.jsonl"
    rows = [json.loads(line) for line in Path(args.prompt_data).read_text().splitlines()]
    rows = [row | {"label": f"new {row['label']}", "metadata": {"level": 1}} for row in rows]
    mended.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = dict(prompt_data=str(mended), apply_chat_template=False, apply_chat_template_kwargs={"a": 1})
    resumed = RolloutDataSource(make_args(**changes))
    resumed.load(0)
    assert prompts(resumed.get_samples(1)) == ["new a3"]


def test_other_data_of_the_same_length_is_refused_at_resume(make_args, tmp_path):
    args = make_args()
    RolloutDataSource(args).save(0)
    text = Path(args.prompt_data).read_text()
    moved, changed = tmp_path / "moved.jsonl", tmp_path / "changed.jsonl"
    moved.write_text(text)
    RolloutDataSource(make_args(prompt_data=str(moved))).load(0)
    changed.write_text(text.replace('"q3"', '"q4"'))
    assert changed.read_text() != text
    with pytest.raises(
        ValueError,
        match=r"--prompt-data \S*changed\S*: contents [0-9a-f]{16}: would .* \(wanted: [0-9a-f]{16},",
    ):
        RolloutDataSource(make_args(prompt_data=str(changed))).load(0)


def test_a_state_of_other_data_is_refused(make_args, prompt_file):
    args = make_args()
    RolloutDataSource(args).save(0)
    args.prompt_data += "@[:10]"
    with pytest.raises(ValueError, match=r"10 prompts, but the run to resume had 20"):
        RolloutDataSource(args).load(0)


def test_the_state_is_plain_data_and_complete_before_it_is_visible(make_args):
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    source.save(0)
    path = state_path(args.save, 0)
    assert torch.load(path, weights_only=True)["sample_offset"] == 0
    assert list(path.parent.iterdir()) == [path]
    (group,) = source.get_samples(1)
    group[0].metadata["handle"] = state_path
    source.add_samples([group])
    with pytest.raises((ValueError, AttributeError)):
        source.save(1)
    assert not state_path(args.save, 1).exists()


def test_the_buffer_comes_first_and_only_takes_whole_groups(make_args):
    source = RolloutDataSourceWithBuffer(make_args())
    groups = source.get_samples(3)
    source.add_samples([groups[2], groups[0]])
    assert prompts(source.get_samples(3)) == ["a2", "a0", "a3"]
    with pytest.raises(ValueError, match="a group is a list of 2 samples, found 1 samples"):
        source.add_samples([groups[0][:1]])
    with pytest.raises(RuntimeError, match="no buffer"):
        RolloutDataSource(make_args()).add_samples(groups)


@pytest.mark.parametrize("leased", [0, 7])
def test_every_group_that_waits_is_saved(make_args, leased):
    """In the buffer, or given out and not come back."""
    args = make_args()
    source = RolloutDataSourceWithBuffer(args)
    account = RolloutAccount(source)
    groups = account.take(9 + leased)
    account.give_back(groups[:9])
    source.save(0)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.get_buffer_length() == 9 + leased
    expected = [*groups[9:], *groups[:9]]
    assert resumed.get_samples(9 + leased) == expected
    assert resumed.get_buffer_length() == 0


def test_a_source_without_a_buffer_gives_leased_groups_out_again_and_no_more_than_asked(make_args):
    args = make_args()
    source = RolloutDataSource(args)
    leased = RolloutAccount(source).take(2)
    source.save(0)
    resumed = RolloutDataSource(args)
    resumed.load(0)
    groups = resumed.get_samples(3)
    assert len(groups) == 3 and groups[:2] == leased


def test_a_buffer_filter_chooses(make_args):
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="tests.rollout.plugins.newest_first"))
    groups = source.get_samples(3)
    source.add_samples(groups)
    assert prompts(source.get_samples(2)) == ["a2", "a1"]
    assert source.get_buffer_length() == 1


def test_what_is_kept_beside_the_prompts_is_saved(make_args, tmp_path):
    args = make_args(dump_details=str(tmp_path / "details"))
    source = RolloutDataSource(args)
    assert (tmp_path / "details" / "tokenizer" / "tokenizer.json").is_file()
    assert source.get_metadata() == {}
    source.update_metadata({"seen": 3})
    source.update_metadata({"level": 1})
    source.save(0)
    again = RolloutDataSource(args)
    again.load(0)
    assert again.get_metadata() == source.get_metadata() == {"seen": 3, "level": 1}
    again.load()
    RolloutDataSource(make_args(load=None)).load(0)
    unsaved = RolloutDataSource(make_args(save=None))
    unsaved.save(5)
    assert not state_path(args.save, 5).exists()


def test_without_a_dataset_samples_are_empty_but_numbered(make_args):
    source = RolloutDataSource(make_args(rollout_global_dataset=False))
    (group,) = source.get_samples(1)
    assert [s.index for s in group] == [0, 1] and group[0].prompt == ""


asked = []


def noting_filter(args, rollout_id, buffer, num_samples):
    asked.append((len(buffer), num_samples))
    return pop_first(args, rollout_id, buffer, num_samples)


def test_a_buffer_filter_is_asked_only_where_it_has_a_choice(make_args):
    asked.clear()
    args = make_args(buffer_filter_path=f"{__name__}.noting_filter")
    source = RolloutDataSourceWithBuffer(args)
    account = RolloutAccount(source)
    account.give_back(account.take(3)[2:])
    source.save(0)
    source = RolloutDataSourceWithBuffer(args)
    source.load(0)  # the two that were leased come before the one in the buffer
    for _ in range(3):
        source.get_samples(2)
    assert asked == [(1, 2)]


def test_a_buffer_filter_that_returns_too_many_is_named(make_args):
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="tests.rollout.plugins.all_of_it"))
    source.add_samples(source.get_samples(5))
    with pytest.raises(ValueError, match=r"all_of_it: returned 5 groups \(wanted: at most 3\)"):
        source.get_samples(3)


def test_numpy_rewards_in_the_buffer_come_back(make_args):
    source = RolloutDataSourceWithBuffer(make_args())
    (group,) = source.get_samples(1)
    group[0].reward = {"score": np.float64(0.5), "ok": np.bool_(True)}
    group[0].metadata["scores"] = np.arange(3)
    source.add_samples([group])
    source.save(0)
    again = RolloutDataSourceWithBuffer(make_args())
    again.load(0)
    sample = again.buffer[0][0]
    assert sample.reward == {"score": 0.5, "ok": True}
    assert sample.metadata["scores"].tolist() == [0, 1, 2]


def test_what_a_buffer_filter_only_selects_leaves_the_buffer(make_args):
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="tests.rollout.plugins.last_selected"))
    source.add_samples(source.get_samples(3))
    assert prompts(source.get_samples(2)) == ["a2", "a1"]
    assert prompts(source.get_samples(2)) == ["a0", "a3"]
    assert source.get_buffer_length() == 0 and not source.ledger.dropped


@pytest.mark.parametrize("name", ["first_twice", "made_up"])
def test_a_buffer_filter_that_multiplies_groups_is_named(make_args, name):
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="tests.rollout.plugins." + name))
    source.add_samples(source.get_samples(2))
    with pytest.raises(ValueError, match=f"{name}: returned a group twice, or one that was not in"):
        source.get_samples(2)


def test_prompts_that_are_too_long_are_told_and_counted(make_args, tokenizer):
    lengths = [len(tokenizer(s.prompt)["input_ids"]) for s in RolloutDataSource(make_args()).dataset.samples]
    limit = sorted(lengths)[9]
    args = make_args(rollout_max_prompt_len=limit)
    source = RolloutDataSource(args)
    kept = sum(length <= limit for length in lengths)
    assert len(source) == kept < 20
    assert source.notices == [
        f"--prompt-data {args.prompt_data}: {20 - kept} of 20 prompts are longer than "
        f"--rollout-max-prompt-len {limit} and left out"
    ]
    assert source.data_metrics() == {"rollout/dropped/prompts_too_long": 20 - kept}


def test_where_no_prompt_is_too_long_nothing_is_said(make_args):
    for args in (make_args(), make_args(rollout_global_dataset=False)):
        source = RolloutDataSource(args)
        assert (source.notices, source.data_metrics()) == ([], {})


def test_a_state_of_the_original_s_is_gone_on_from(make_args):
    """It has no buffer, no books and no number of prompts, and its metadata may hold numpy's types."""
    args = make_args()
    path = state_path(args.load, 0)
    path.parent.mkdir(parents=True)
    position = dict(sample_offset=3, epoch_id=0, sample_group_index=3, sample_index=6)
    torch.save({**position, "metadata": {"seen": np.int64(3), "scores": np.array([0.5, 1.0])}}, path)
    source = RolloutDataSourceWithBuffer(args)
    source.load(0)
    (group,) = source.get_samples(1)
    assert (group[0].group_index, group[0].index) == (3, 6) and source.ledger.balanced
    assert source.metadata["seen"] == 3 and source.metadata["scores"].tolist() == [0.5, 1.0]
