"""What a model computes travels as one record, ragged fields of the table among it."""

import numpy as np
import pytest
import torch

from slime.config.run import run_config
from slime.ray.train_worker import TrainWorker
from slime.training.batch import FIELDS, Average, Axis, Field, loss_fields
from slime.training.conversion import convert_samples_to_train_data, split_train_data_by_dp
from slime.training.inputs import PackedInputs
from slime.training.micro_batches import DataIterator, packed_micro_batch, tensorize
from slime.training.parallel import ParallelContext
from slime.utils.model_inputs import SequenceInputs
from slime.utils.types import Sample
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, trainer_args

HERE = "tests.training.test_inputs"
CPU = torch.device("cpu")
CONFIG = {"cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
PATCHES = Field(
    Axis.RAGGED,
    lambda sample: sample.metadata.get("patches"),
    lambda sample: np.zeros((0, 3)),
    dtype=torch.float32,
    in_loss=True,
    average=Average.BY_SAMPLE,
)


def patches_of(index):
    """From none to four patches of three numbers."""
    return np.arange(3 * (index % 5)).reshape(-1, 3) + index


def _batch(samples):
    return convert_samples_to_train_data(samples, [1.0] * len(samples), [0.5] * len(samples))


def _samples(count=8):
    return [
        Sample(
            index=i,
            tokens=[*range(1, 6 + i)],
            response_length=2 + i % 3,
            reward=1.0,
            metadata={"patches": patches_of(i)} if i % 5 else {},
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


@pytest.fixture
def field(monkeypatch):
    """A ragged field, as an input of models."""
    media = Field(**{**vars(PATCHES), "media": True})
    monkeypatch.setitem(FIELDS, "patches", media)


@pytest.mark.parametrize(("cp_size", "contiguous"), [(1, False), (2, False), (2, True)])
def test_a_ragged_field_is_split_packed_and_micro_batched_with_its_samples(
    field, checkpoint, cp_size, contiguous
):
    args = trainer_args(checkpoint, max_tokens_per_gpu=24)
    shards = split_train_data_by_dp(run_config(args), _batch(_samples()), {**CONFIG, "dp_size": 2})
    seen = []
    for shard in shards:
        batch = tensorize(shard, CPU)
        for rank in range(cp_size):
            context = ParallelContext(cp_rank=rank, cp_size=cp_size, contiguous_cp=contiguous)
            data = DataIterator(batch, batch["micro_batch_indices"])
            assert len(batch["micro_batch_indices"]) > 1
            for _ in batch["micro_batch_indices"]:
                micro_batch = packed_micro_batch(data, loss_fields(batch), 4, context)
                indices, patches = micro_batch["sample_indices"], micro_batch["inputs"].media["patches"]
                wanted = [torch.tensor(patches_of(i), dtype=torch.float32) for i in indices]
                # Whole on every rank that shares the sequences.
                assert torch.equal(patches.values, torch.cat(wanted))
                assert patches.lengths == tuple(i % 5 for i in indices)
                assert all(map(torch.equal, micro_batch["patches"], wanted))
                seen += indices if rank == 0 else []
    assert sorted(seen) == [*range(8)]


def test_entries_of_a_ragged_field_have_one_form(field, checkpoint):
    samples = _samples()
    samples[3].metadata["patches"] = np.zeros((2, 4))
    (shard,) = split_train_data_by_dp(
        run_config(trainer_args(checkpoint)), _batch(samples), {**CONFIG, "dp_size": 1}
    )
    with pytest.raises(ValueError, match=r"sample \d: patches has entries of shape \[\d\], wanted \[\d\]"):
        tensorize(shard, CPU)


def loss_of_patches(args, batch, logits, sum_of_sample_mean):
    """The mean over samples of the sum of their patches; its gradient is nothing."""
    sums = [
        patches.sum().expand(n)
        for patches, n in zip(batch["patches"], batch["response_lengths"], strict=True)
    ]
    mean = sum_of_sample_mean(torch.cat(sums))
    return mean + 0 * logits.sum(), {"patches": mean.detach()}


def _trained(rank, args, rollout):
    FIELDS["patches"] = PATCHES
    worker = TrainWorker(args)
    worker.start()
    config = worker.parallel_config()
    return worker.train_shard(
        0, split_train_data_by_dp(run_config(args), rollout, config)[config["dp_rank"]]
    )[0]


@pytest.mark.slow
def test_a_ragged_field_reaches_losses_and_metrics_of_every_layout(checkpoint):
    """DP 2, CP 2 and PP 2 at once: eight ranks."""
    count = 8
    rollout = random_rollout(256, count) | {"patches": [patches_of(i) for i in range(count)]}
    args = trainer_args(
        checkpoint,
        **{"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "global_batch_size": 4},
        **{"loss_type": "custom_loss", "custom_loss_function_path": f"{HERE}.{loss_of_patches.__name__}"},
    )
    report = next(filter(None, run_ranks(_trained, 8, args, rollout)))
    for step, metrics in enumerate(report["train"]):
        wanted = sum(patches_of(i).sum() for i in range(4 * step, 4 * step + 4)) / 4
        assert metrics["train/patches"] == pytest.approx(wanted)
    assert len(report["train"]) == 2
    assert report["rollout"]["rollout/patches"] == pytest.approx(sum(i % 5 for i in range(count)) / count)


def _inputs(**more):
    return SequenceInputs([1, 2, 3], **more)


def test_a_key_is_that_of_all_that_is_computed():
    image = {"pixels": np.ones((2, 3), np.float32)}
    keys = [
        _inputs().cache_key,
        SequenceInputs([1, 2, 4]).cache_key,
        _inputs(media=image).cache_key,
        _inputs(media={"pixels": np.zeros((2, 3), np.float32)}).cache_key,
        _inputs(media={"pixels": np.ones((3, 2), np.float32)}).cache_key,
        _inputs(media={"pixels": np.ones((2, 3), np.int32)}).cache_key,
        _inputs(media={"audio": image["pixels"]}).cache_key,
        _inputs(positions=np.arange(3)).cache_key,
    ]
    assert len({*keys}) == len(keys)
    assert _inputs(media={"pixels": torch.ones(2, 3)}).cache_key == keys[2]
    assert SequenceInputs(torch.tensor([1, 2, 3])).cache_key == keys[0]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_places_are_packed_and_split_as_tokens_are(cp_size):
    """A text between has the same place on all three axes."""
    places = torch.arange(15).reshape(3, 5) + 100
    sequences = [SequenceInputs(torch.arange(1, 4)), SequenceInputs(torch.arange(4, 9), positions=places)]
    for rank in range(cp_size):
        inputs = PackedInputs.of(sequences, ParallelContext(cp_rank=rank, cp_size=cp_size), 4)
        tokens, found = inputs.tokens[0], inputs.layout.positions
        assert found.shape == (3, len(tokens))
        for column, token in enumerate(tokens.tolist()):
            wanted = [token - 1] * 3 if token < 4 else places[:, token - 4].tolist()
            assert not token or found[:, column].tolist() == wanted
        with pytest.raises(ValueError, match="positions on 3 axes: this rotation knows 1"):
            inputs.layout.rope(None, 4, torch.float32)


def test_a_model_of_text_refuses_media_by_name():
    image = {"pixels": torch.ones(2, 3)}
    inputs = PackedInputs.of([SequenceInputs(torch.arange(3), media=image)], ParallelContext())
    with pytest.raises(ValueError, match="Qwen3 computes tokens only, but samples have pixels"):
        inputs.refuse_media("Qwen3")
