import numpy as np
import pytest
import torch

from slime.config.run import run_config
from slime.training.batch import REQUIRED, BatchError
from slime.training.conversion import (
    convert_samples_to_train_data,
    fill_rollout_ids,
    flatten_samples,
    in_order,
    left_out,
    mean_raw_reward,
    samples_to_train_data,
    split_train_data_by_dp,
)
from slime.training.rewards import name_groups, post_process_rewards
from slime.utils.types import Sample
from tests.run_args import run_args


def train_config(**overrides):
    flags = dict(
        n_samples_per_prompt=2, rollout_batch_size=2, global_batch_size=4, grpo_std_normalization=True
    )
    return run_config(run_args(**{**flags, **overrides}))


def make_samples(rewards):
    return [
        Sample(
            index=i,
            tokens=list(range(10 * i, 10 * i + 4 + i)),
            response_length=2,
            reward=reward,
            rollout_log_probs=[-0.5, -float(i)],
            status=Sample.Status.TRUNCATED if i == 1 else Sample.Status.COMPLETED,
        )
        for i, reward in enumerate(rewards)
    ]


def custom_convert(args, samples):
    return {key: [] for key in REQUIRED} | {"mine": True}


def half_convert(args, samples):
    return {"tokens": [s.tokens for s in samples]}


def custom_post_process(args, samples):
    return [7.0], [8.0]


def test_rewards_are_normalised_within_their_group():
    raw, rewards = post_process_rewards(train_config(), make_samples([1.0, 0.0, 5.0, 5.0]))
    assert raw == [1.0, 0.0, 5.0, 5.0]
    # deviation 0.5, sample standard deviation sqrt(0.5)
    assert rewards == pytest.approx([0.5**0.5, -(0.5**0.5), 0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("reward", [0.1, 5.3, 100.1])
def test_equal_rewards_leave_nothing_to_learn(reward):
    run = train_config(n_samples_per_prompt=7, rollout_batch_size=1)
    _, rewards = post_process_rewards(run, make_samples([reward] * 7))
    assert rewards == pytest.approx([0.0] * 7, abs=1e-6)


def in_groups(*groups):
    """Samples of given rewards, group by group; a list among them is an execution that was split."""
    samples = []
    for group_index, rewards in enumerate(groups):
        for reward in rewards:
            rollout_id = 100 + len(samples) if isinstance(reward, list) else None
            for part in reward if isinstance(reward, list) else [reward]:
                index = len(samples)
                samples.append(
                    Sample(index=index, group_index=group_index, reward=part, rollout_id=rollout_id)
                )
    return samples


def processed(samples, **overrides):
    return post_process_rewards(train_config(**overrides), samples)[1]


def test_groups_of_3_and_5_are_not_cut_into_4_and_4():
    samples = in_groups([0.0, 3.0, 6.0], [1.0, 1.0, 1.0, 1.0, 6.0])
    flags = dict(n_samples_per_prompt=4, grpo_std_normalization=False)
    assert processed(samples, **flags) == [-3.0, 0.0, 3.0, -1.0, -1.0, -1.0, -1.0, 4.0]


def test_groups_may_lie_in_each_other():
    first, second = in_groups([0.0, 2.0], [10.0, 14.0])[::2], in_groups([0.0, 2.0], [10.0, 14.0])[1::2]
    assert processed(first + second, grpo_std_normalization=False) == [-1.0, -2.0, 1.0, 2.0]


def test_a_split_execution_leaves_the_other_groups_alone():
    plain = in_groups([1.0, 0.0], [5.0, 9.0])
    split = in_groups([1.0, 0.0], [[5.0, 5.0, 5.0], 9.0])
    before, after = processed(plain), processed(split)
    assert after == [*before[:2], *[before[2]] * 3, before[3]]


def test_the_parts_of_an_execution_share_one_vote():
    samples = in_groups([[1.0, 3.0], 5.0, 8.0])
    flags = dict(n_samples_per_prompt=3, rollout_batch_size=1)
    centred = processed(samples, **flags, grpo_std_normalization=False)
    assert centred == [-4.0, -2.0, 0.0, 3.0]
    # Of half a vote each: (16 + 4) / 2, then whole votes, over one less than there are votes.
    deviation = ((16 + 4) / 2 + 0 + 9) ** 0.5 / 2**0.5
    assert processed(samples, **flags) == pytest.approx([x / deviation for x in centred], rel=1e-5)


def test_parts_that_differ_where_the_votes_do_not_make_no_huge_advantages():
    assert max(processed(in_groups([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5]]))) < 2


@pytest.mark.parametrize("rewards", [[7.0], [[7.0, 7.0]]])
def test_a_group_of_one_vote_has_nothing_to_learn(rewards):
    assert set(processed(in_groups(rewards, [0.0, 1.0]))[: len(rewards)]) == {0.0}


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 16, 33])
@pytest.mark.parametrize("named", [True, False])
def test_regular_groups_are_normalised_to_the_last_bit_as_by_one_matrix(size, named):
    rewards = torch.rand(5, size, generator=torch.Generator().manual_seed(size)).double()
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    wanted = centred / (centred.std(dim=-1, keepdim=True) + 1e-6)
    samples = in_groups(*rewards.tolist())
    if not named:
        for sample in samples:
            sample.group_index = None
    flags = dict(n_samples_per_prompt=size, rollout_batch_size=5)
    assert processed(samples, **flags) == wanted.flatten().tolist()


def test_groups_without_a_number_are_the_lists_in_which_they_came():
    samples = make_samples([1.0, 2.0, 6.0, 0.0, 4.0])
    name_groups(train_config(), [samples[:3], [[samples[3]], samples[4:]]], samples)
    assert [sample.group_index for sample in samples] == [0, 0, 0, 1, 1]
    assert processed(samples, grpo_std_normalization=False) == [-2.0, -1.0, 3.0, -2.0, 2.0]


@pytest.mark.parametrize(
    "nest",
    [
        lambda samples: samples,
        lambda samples: [[sample] for sample in samples],
        lambda samples: [samples[:2], *samples[2:]],
    ],
)
def test_lists_that_tell_no_groups_name_none(nest):
    samples = make_samples([1.0, 2.0, 6.0])
    name_groups(train_config(), nest(samples), samples)
    assert {sample.group_index for sample in samples} == {None}
    regular, named = make_samples([0.0] * 4), in_groups([1.0, 0.0, 5.0])
    named[0].group_index = None
    for others in (regular, named):
        before = [sample.group_index for sample in others]
        name_groups(train_config(), [others], others)
        assert [sample.group_index for sample in others] == before


def test_samples_without_a_group_are_refused_unless_groups_follow_one_another():
    with pytest.raises(
        BatchError, match=r"samples \[0, 1, 2\] have no group_index.*: set one number on .* of 4, found 3"
    ):
        processed(make_samples([1.0, 2.0, 6.0]))
    samples = in_groups([1.0, 0.0], [1.0, 0.0])
    samples[2].group_index = None
    with pytest.raises(BatchError, match=r"samples \[2\] have no group_index"):
        processed(samples)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ({"advantage_estimator": "reinforce_plus_plus"}, [1.0, 0.0, 5.0, 5.0]),
        ({"rewards_normalization": False}, [1.0, 0.0, 5.0, 5.0]),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, [0.5, -0.5, 0.0, 0.0]),
    ],
)
def test_only_group_based_estimators_normalise(overrides, wanted):
    assert post_process_rewards(train_config(**overrides), make_samples([1.0, 0.0, 5.0, 5.0]))[1] == wanted


def test_a_missing_reward_is_an_error():
    with pytest.raises(BatchError, match=r"sample 1 of group None \(truncated\) has no reward"):
        post_process_rewards(train_config(), make_samples([1.0, None, 0.0, 0.0]))
    with pytest.raises(BatchError, match="reward is a dict, pass --reward-key"):
        post_process_rewards(train_config(), make_samples([{"acc": 1}] * 4))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), "1.0"])
def test_a_reward_that_is_no_finite_number_is_refused_by_name(reward):
    samples = in_groups([1.0, 0.0], [reward, 1.0])
    with pytest.raises(BatchError, match=r"sample 2 of group 1: reward is .*, wanted a finite number"):
        processed(samples)
    with pytest.raises(BatchError, match=r"sample 2 of group 1: reward is .*, wanted a finite number"):
        processed(samples, advantage_estimator="reinforce_plus_plus")


def nan_post_process(args, samples):
    return [s.reward for s in samples], [1.0, float("nan"), 1.0, 1.0]


def nan_convert(args, samples):
    batch = convert_samples_to_train_data(samples, [0.0] * 4, [0.0] * 4)
    return batch | {"rewards": [0.0, float("inf"), 0.0, 0.0]}


def half_masked_convert(args, samples):
    batch = convert_samples_to_train_data(samples, [0.0] * 4, [0.0] * 4)
    return batch | {"loss_masks": [[1, 1], [1, 0.5], [1, 1], [1, 1]]}


@pytest.mark.parametrize(
    ("option", "function", "message"),
    [
        ("custom_reward_post_process_path", "nan_post_process", "sample 1: reward nan, wanted a finite"),
        ("custom_convert_samples_to_train_data_path", "nan_convert", "sample 1: reward inf, wanted a finite"),
        (
            "custom_convert_samples_to_train_data_path",
            "half_masked_convert",
            "sample 1: loss mask with 0.5 in it, wanted 0 and 1 only",
        ),
    ],
)
def test_what_user_code_makes_of_a_batch_is_checked_and_the_code_is_named(option, function, message):
    path = f"{__name__}.{function}"
    with pytest.raises(BatchError, match=f"{path}: {message}"):
        samples_to_train_data(train_config(**{option: path}), make_samples([0.0] * 4))


def array_convert(args, samples):
    batch = convert_samples_to_train_data(samples, [0.0] * 4, [0.0] * 4)
    return batch | {"sample_indices": np.arange(7, 11), "rewards": np.zeros(4)}


def list_convert(args, samples):
    return array_convert(args, samples) | {"rewards": [[0.5, 1.0], [0.0], [], [1.0]]}


def test_indices_of_samples_may_be_an_array():
    run = train_config(custom_convert_samples_to_train_data_path=f"{__name__}.array_convert")
    assert samples_to_train_data(run, make_samples([0.0] * 4))["sample_indices"].tolist() == [7, 8, 9, 10]


def test_advantages_of_ones_own_may_have_a_reward_per_turn():
    path = f"{__name__}.list_convert"
    run = train_config(custom_convert_samples_to_train_data_path=path)
    with pytest.raises(BatchError, match=rf"{path}: sample 7: reward \[0.5, 1.0\], wanted a finite number"):
        samples_to_train_data(run, make_samples([0.0] * 4))
    run = train_config(
        custom_convert_samples_to_train_data_path=path, custom_advantage_function_path="mine.advantages"
    )
    assert samples_to_train_data(run, make_samples([0.0] * 4))["rewards"][0] == [0.5, 1.0]


@pytest.mark.parametrize("value", [0.5, -1, 2, float("nan")])
def test_a_part_of_a_token_cannot_be_trained(value):
    samples = make_samples([0.0] * 4)
    samples[3].loss_mask = [1, value]
    with pytest.raises(BatchError, match=f"sample 3: loss mask with {value} in it, wanted 0 and 1 only"):
        samples_to_train_data(train_config(), samples)


@pytest.mark.parametrize("mask", [[True, False], [1.0, 0.0], np.array([1, 0]), torch.tensor([1.0, 0.0])])
def test_zeros_and_ones_of_any_kind_are_a_mask(mask):
    samples = make_samples([0.0] * 4)
    samples[3].loss_mask = mask
    assert samples_to_train_data(train_config(), samples)["rollout_mask_sums"] == [2, 2, 2, 1]


def test_what_fills_no_step_is_known():
    run = train_config(global_batch_size=2)
    samples = make_samples([0.0] * 5)
    for i, sample in enumerate(samples):
        sample.group_index = i // 2
    batch = samples_to_train_data(run, samples)
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    assert left_out(batch, split_train_data_by_dp(run, batch, config)) == [4]
    run = train_config(global_batch_size=5)
    assert left_out(batch, split_train_data_by_dp(run, batch, {**config, "dp_size": 1})) == []


def test_the_batch_holds_every_sample_under_the_reference_keys():
    samples = make_samples([1.0, 0.0, 5.0, 5.0])
    samples[2].loss_mask = [0, 1]
    samples[3].remove_sample = True
    batch = samples_to_train_data(train_config(), samples)
    assert batch["tokens"][1] == [10, 11, 12, 13, 14]
    assert batch["response_lengths"] == [2, 2, 2, 2]
    assert batch["loss_masks"] == [[1, 1], [1, 1], [0, 1], [0, 0]]
    assert batch["rollout_mask_sums"] == [2, 2, 1, 0]
    assert batch["truncated"] == [0, 1, 0, 0]
    assert batch["sample_indices"] == batch["rollout_ids"] == [0, 1, 2, 3]
    assert batch["rollout_log_probs"][1] == [-0.5, -1.0]
    assert batch["raw_reward"] == [1.0, 0.0, 5.0, 5.0]
    assert "teacher_log_probs" not in batch


def test_siblings_share_their_mask_sum():
    samples = make_samples([0.0] * 4)
    samples[0].rollout_id = samples[1].rollout_id = 9
    samples[1].loss_mask = [0, 1]
    batch = convert_samples_to_train_data(samples, [0.0] * 4, [0.0] * 4)
    assert batch["rollout_ids"] == [9, 9, 0, 1]
    assert batch["rollout_mask_sums"] == [3, 3, 2, 2]


def test_missing_rollout_ids_take_the_smallest_unused_numbers():
    assert fill_rollout_ids([None, 0, None, 2, None]) == [1, 0, 3, 2, 4]


def test_a_field_that_only_some_samples_have_is_an_error():
    samples = make_samples([0.0] * 4)
    samples[2].rollout_log_probs = None
    with pytest.raises(BatchError, match=r"samples \[2\] have no rollout_log_probs"):
        samples_to_train_data(train_config(), samples)


def test_a_mask_of_the_wrong_length_is_an_error():
    samples = make_samples([0.0] * 4)
    samples[2].loss_mask = [1]
    with pytest.raises(BatchError, match=r"sample 2 .*loss mask of 1 for 2 response tokens"):
        samples_to_train_data(train_config(), samples)


def test_the_mean_raw_reward_is_that_of_what_is_trained():
    """As the conversion says it; rewards that are no numbers have none."""
    shards = [{"partition": [3, 0]}, {"partition": [2]}]  # sample 1 fills no step
    assert mean_raw_reward({"raw_reward": [1, 9.0, 2.5, True]}, shards) == {"rollout/raw_reward": 1.5}
    assert mean_raw_reward({"raw_reward": [1.0, "bad", 2.0, 3.0]}, shards) == {}


def test_the_raw_reward_in_the_metadata_is_reported():
    samples = make_samples([0.0] * 4)
    samples[1].metadata["raw_reward"] = 42
    assert samples_to_train_data(train_config(), samples)["raw_reward"] == [0.0, 42, 0.0, 0.0]
    for sample in samples:
        sample.metadata["raw_reward"] = "any"
    assert samples_to_train_data(train_config(), samples)["raw_reward"] == ["any"] * 4


def test_without_one_in_the_metadata_the_number_is_reported_that_was_trained_on():
    samples = make_samples([0.0] * 4)
    for sample in samples:
        sample.reward = {"score": 2.0}
    assert samples_to_train_data(train_config(reward_key="score"), samples)["raw_reward"] == [2.0] * 4


def test_user_functions_take_the_place_of_ours():
    path = "tests.training.test_conversion."
    run = train_config(custom_convert_samples_to_train_data_path=path + "custom_convert")
    assert samples_to_train_data(run, make_samples([None]))["mine"] is True
    run = train_config(custom_convert_samples_to_train_data_path=path + "half_convert")
    with pytest.raises(BatchError, match="half_convert: its result lacks loss_masks, raw_reward, "):
        samples_to_train_data(run, make_samples([None]))
    run = train_config(custom_reward_post_process_path=path + "custom_post_process")
    assert post_process_rewards(run, make_samples([None])) == ([7.0], [8.0])


def test_flattening_takes_any_nesting():
    a, b, c, d = make_samples([0.0] * 4)
    assert flatten_samples([[a, b], [c, d]]) == [a, b, c, d]
    assert flatten_samples([[[a], [b]], [c, [d]]]) == [a, b, c, d]
    b.rollout_id = c.rollout_id = 5
    assert flatten_samples([[a], [[b, c], d]]) == [a, b, c, d]
    assert flatten_samples([[[a, [b, c]], d]]) == [a, b, c, d]


def test_flattening_keeps_order_and_wants_one_id_per_execution():
    a, b, c, d = make_samples([0.0] * 4)
    b.rollout_id = c.rollout_id = 5
    assert flatten_samples([[a, [b, c]], [d, []]]) == [a, b, c, d]
    c.rollout_id = 6
    with pytest.raises(BatchError, match=r"samples \[1, 2\] .*rollout ids \[5, 6\]"):
        flatten_samples([[a, [b, c]], [d]])
    b.rollout_id = c.rollout_id = None
    with pytest.raises(BatchError, match="expected one common id"):
        flatten_samples([[a, [b, c]], [d]])


@pytest.mark.parametrize(
    "nest",
    [
        lambda a, b, c, d: [[[a, b], [c, d]]],
        lambda a, b, c, d: [[[a, b]], [[c, d]]],
        lambda a, b, c, d: [[a, b], [c, d]],
        lambda a, b, c, d: [[[a]], [[b]]],
        lambda a, b, c, d: [[[a], [b]]],
        lambda a, b, c, d: [[[a, b], c]],
    ],
)
def test_two_executions_with_one_rollout_id_are_refused(nest):
    samples = make_samples([0.0] * 4)
    for sample in samples:
        sample.rollout_id = 3
    with pytest.raises(BatchError, match="rollout id 3 is that of another execution too"):
        flatten_samples(nest(*samples))


def test_an_evaluation_is_flattened_whatever_its_ids():
    a, b, c, d = make_samples([0.0] * 4)
    a.rollout_id = b.rollout_id = d.rollout_id = 3
    assert in_order([[a, [b, c]], d]) == [a, b, c, d]


def test_a_recording_tells_executions_by_group_and_id():
    samples = in_groups([[1.0, 2.0], 0.0], [[1.0, 2.0]])
    assert flatten_samples(samples) == samples
    samples[3].rollout_id = samples[4].rollout_id = samples[0].rollout_id
    with pytest.raises(BatchError, match="that of another execution too"):
        flatten_samples(samples)


def test_shards_tile_the_batch():
    run = train_config()
    batch = samples_to_train_data(run, make_samples([1.0, 0.0, 5.0, 5.0]))
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    shards = split_train_data_by_dp(run, batch, config)
    assert len(shards) == 2
    positions = [position for shard in shards for position in shard["partition"]]
    assert sorted(positions) == [0, 1, 2, 3]
    for shard in shards:
        assert shard["tokens"] == [batch["tokens"][i] for i in shard["partition"]]
        assert shard["rollout_log_probs"] == [batch["rollout_log_probs"][i] for i in shard["partition"]]
        assert shard["total_lengths"] == [4, 5, 6, 7]
        assert shard["raw_reward"] == batch["raw_reward"]
        assert shard["global_batch_sizes"] == [4]
        assert len(shard["micro_batch_indices"]) == sum(shard["num_microbatches"])


def within_nuclei(samples):
    for sample in samples:
        ids = [token for token in sample.tokens[-2:] for token in (token, (token + 1) % 64)]
        sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = ids, [0, 2, 4]
    return samples


def test_nuclei_travel_to_the_rank_that_trains_their_sample():
    samples = within_nuclei(make_samples([1.0, 0.0, 1.0, 0.0]))
    # never answered, and not trained on: nobody recorded anything
    samples[0].rollout_top_p_token_ids = samples[0].rollout_top_p_token_offsets = None
    samples[0].remove_sample = True
    run = train_config(replays_nucleus=True, vocab_size=64)
    batch = samples_to_train_data(run, samples)
    config = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    for shard in split_train_data_by_dp(run, batch, config):
        for position, ids, offsets in zip(
            shard["partition"],
            shard["rollout_top_p_token_ids"],
            shard["rollout_top_p_token_offsets"],
            strict=True,
        ):
            wanted = (
                ([], [0, 0, 0]) if position == 0 else (samples[position].rollout_top_p_token_ids, [0, 2, 4])
            )
            assert (ids.tolist(), offsets.tolist()) == wanted and ids.dtype == offsets.dtype == np.int32


def test_a_batch_to_be_trained_within_nuclei_has_them():
    run = train_config(replays_nucleus=True, vocab_size=64)
    with pytest.raises(
        BatchError, match=r"--rollout-top-p, --rollout-top-k: no sample has rollout_top_p_token_ids"
    ):
        samples_to_train_data(run, make_samples([1.0, 0.0, 1.0, 0.0]))
    samples = within_nuclei(make_samples([1.0, 0.0, 1.0, 0.0]))
    samples[2].rollout_top_p_token_ids = samples[2].rollout_top_p_token_offsets = None
    with pytest.raises(
        BatchError, match=r"samples \[2\] have no rollout_top_p_token_ids, but others in the batch do"
    ):
        samples_to_train_data(run, samples)
    samples = within_nuclei(make_samples([1.0, 0.0, 1.0, 0.0]))
    samples[1].rollout_top_p_token_offsets = [0, 0, 4]
    with pytest.raises(BatchError, match="sample 1: 1 tokens that are trained on have no nucleus"):
        samples_to_train_data(run, samples)
