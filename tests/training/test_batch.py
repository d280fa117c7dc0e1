"""The table of fields, and keys that are in no row of it."""

import numpy as np
import pytest
import torch

from slime.config.run import run_config
from slime.training.batch import FIELDS, BatchError, loss_fields, sample_fields
from slime.training.conversion import convert_samples_to_train_data, split_train_data_by_dp
from slime.training.micro_batches import DataIterator, packed_micro_batch, tensorize
from slime.utils.types import Sample
from tests.trainer_batches import random_rollout, trainer_args


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    from tests.megatron_harness import save_tiny_hf

    return trainer_args(save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3"))


CONFIG = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def shards(args, **extra):
    return split_train_data_by_dp(run_config(args), random_rollout(256) | extra, CONFIG)


def test_unknown_keys_with_an_entry_per_sample_are_split_like_samples(args):
    batch = random_rollout(256)
    lengths = [len(tokens) for tokens in batch["tokens"]]
    for shard in shards(args, mine=lengths, tensor=torch.tensor(lengths), array=np.array(lengths)):
        own = [len(tokens) for tokens in shard["tokens"]]
        assert shard["mine"] == own
        assert shard["tensor"].tolist() == own and shard["array"].tolist() == own


def test_unknown_keys_of_the_whole_batch_reach_every_rank(args):
    for shard in shards(args, note="a word", table={"a": 1}, number=3):
        assert (shard["note"], shard["table"], shard["number"]) == ("a word", {"a": 1}, 3)


def test_a_sequence_of_another_length_is_refused_by_name(args):
    with pytest.raises(BatchError, match="mine: 3 entries for a batch of 8 samples"):
        shards(args, mine=[1, 2, 3])


def test_losses_find_unknown_keys_and_train_metadata_in_their_micro_batches(args):
    shard = shards(args, mine=[*range(8)], metadata=[{"n": n} for n in range(8)])[1]
    batch = tensorize(shard, torch.device("cpu"))
    micro_batch = packed_micro_batch(
        DataIterator(batch, batch["micro_batch_indices"]), loss_fields(batch), pad_multiple=4
    )
    first = [shard["mine"][i] for i in shard["micro_batch_indices"][0]]
    assert micro_batch["mine"] == first
    assert [entry["n"] for entry in micro_batch["metadata"]] == first


def test_train_metadata_of_samples_becomes_a_field(args):
    samples = [
        Sample(index=i, tokens=[1, 2], response_length=1, reward=1.0, train_metadata={"n": i})
        for i in range(2)
    ]
    batch = convert_samples_to_train_data(samples, [1.0, 1.0], [0.0, 0.0])
    assert batch["metadata"] == [{"n": 0}, {"n": 1}]


def test_every_row_names_a_field_once_and_only_computed_ones_are_not_read():
    read_elsewhere = {
        "rewards",
        "raw_reward",
        "loss_masks",
        "sample_indices",
        "rollout_ids",
        "rollout_mask_sums",
    }
    for name, field in FIELDS.items():
        assert not (field.read and name in read_elsewhere)
        assert not field.required or field.read or name in read_elsewhere
    assert "partition" not in sample_fields({"tokens": [[1]], "partition": [5, 6]})


def test_media_that_no_field_takes_are_refused_by_name():
    samples = [
        Sample(index=i, tokens=[1, 2], response_length=1, multimodal_train_inputs=media)
        for i, media in enumerate([None, {"sounds": np.zeros((2, 3))}])
    ]
    with pytest.raises(BatchError, match=r"sample 1 of .*: multimodal_train_inputs has sounds, which"):
        convert_samples_to_train_data(samples, [1.0, 1.0], [0.0, 0.0])
