"""Optimizer steps of several adapters: how they are cut, and what is told of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.training.adapter_steps import Part, metrics_of_step, num_steps, parts_of, runs_of, steps_of
from slime.training.batch import ADAPTER_STEPS, BatchError
from slime.training.conversion import samples_to_train_data, split_train_data_by_dp
from slime.training.schedule import build_dp_schedule
from slime.utils.types import Sample
from tests.training.test_conversion import make_samples, train_config
from tests.training.test_schedule import _args, _config

NAMES = ["a", "b"]


@given(st.data())
def test_every_part_is_cut_as_if_its_samples_were_all_there_are(data):
    """Micro-batches of one adapter each, equally many on all ranks, of the rollouts of its step."""
    dp, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 6))
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=4 * groups, max_size=4 * groups))
    names = [data.draw(st.sampled_from(NAMES)) for _ in range(groups) for _ in range(4)]
    names = [names[4 * (i // 4)] for i in range(len(lengths))]
    size = 4 * (groups // 2)
    layout = _config(dp)
    made = build_dp_schedule(
        _args(),
        layout,
        lengths,
        global_batch_size=size,
        rollout_indices=[*range(len(lengths))],
        adapters=names,
    )
    assert len(made.adapter_steps) == len(made.num_microbatches) == len(made.global_batch_sizes)
    at = [0] * dp
    for number, (step, name) in enumerate(made.adapter_steps):
        own = [i for i in range(step * size, (step + 1) * size) if names[i] == name]
        alone = build_dp_schedule(
            _args(),
            layout,
            [lengths[i] for i in own],
            global_batch_size=len(own),
            rollout_indices=[*range(len(own))],
        )
        assert made.global_batch_sizes[number] == len(own)
        assert [made.num_microbatches[number]] == alone.num_microbatches
        for rank in range(dp):
            bins = made.micro_batch_indices[rank][at[rank] : at[rank] + made.num_microbatches[number]]
            at[rank] += len(bins)
            wanted = [[own[alone.partitions[rank][i]] for i in b] for b in alone.micro_batch_indices[rank]]
            assert [[made.partitions[rank][i] for i in b] for b in bins] == wanted
    steps = {step for step, _ in made.adapter_steps}
    assert steps == {*range(len(lengths) // size)}


def test_an_adapter_with_fewer_samples_than_ranks_is_named():
    with pytest.raises(ValueError, match="step 0 has 1 samples of adapter b, wanted at least dp_size 2"):
        build_dp_schedule(
            _args(),
            _config(2),
            [5] * 4,
            global_batch_size=4,
            rollout_indices=[*range(4)],
            adapters=["a", "a", "a", "b"],
        )


BATCH = {
    "num_microbatches": [3, 2, 4],
    "global_batch_sizes": [12, 4, 16],
    ADAPTER_STEPS: [(0, "a"), (0, "b"), (1, "b")],
}


def test_parts_come_in_the_order_of_their_micro_batches():
    assert [[part.adapter for part in parts] for parts in steps_of(BATCH)] == [["a", "b"], ["b"]]
    assert list(runs_of(BATCH)) == [("a", [3]), ("b", [2, 4])]
    assert num_steps(BATCH) == 2
    plain = {key: value for key, value in BATCH.items() if key != ADAPTER_STEPS}
    assert parts_of(plain) == [Part(0, None, 3, 12), Part(1, None, 2, 4), Part(2, None, 4, 16)]
    assert list(runs_of(plain)) == [(None, [3, 2, 4])] and num_steps(plain) == 3


def test_metrics_of_a_step_are_means_over_rollouts_beside_those_of_each_adapter():
    parts = next(steps_of(BATCH))
    found = metrics_of_step(parts, [{"loss": 1.0, "skipped": 0.0}, {"loss": 5.0}])
    assert found == {
        "loss": 2.0,
        "adapter/a/loss": 1.0,
        "adapter/a/skipped": 0.0,
        "adapter/b/loss": 5.0,
    }
    assert metrics_of_step(parts, [{}, {}]) == {}  # before the last pipeline stage
    assert metrics_of_step([Part(0, None, 1, 8)], [{"loss": 1.0}]) == {"loss": 1.0}


def _samples(*names):
    samples = make_samples([1.0, 0.0, 5.0, 5.0])
    for sample, name in zip(samples, names, strict=True):
        sample.metadata = {"lora_adapter": name} if name else {}
    return samples


def _several(**flags):
    return train_config(lora_rank=4, lora_merge=False, lora_adapters=NAMES, **flags)


def test_samples_say_whose_they_are_and_a_shard_has_the_parts():
    batch = samples_to_train_data(_several(), _samples("b", "b", "a", "a"))
    assert batch["adapter"] == ["b", "b", "a", "a"]
    config = _several(use_dynamic_batch_size=True, max_tokens_per_gpu=64)
    layout = dict(dp_size=2, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    for shard in split_train_data_by_dp(config, batch, layout):
        assert shard[ADAPTER_STEPS] == [(0, "a"), (0, "b")] and shard["adapter"] == ["a", "b"]
        assert shard["global_batch_sizes"] == [2, 2] and shard["num_microbatches"] == [1, 1]


def test_samples_that_say_something_else_are_refused():
    for name, found in (("c", "lora_adapter 'c'"), (None, "no lora_adapter")):
        message = f"sample 1 .*its metadata have {found} .wanted: one of --lora-adapters, a, b"
        with pytest.raises(BatchError, match=message):
            samples_to_train_data(_several(), _samples("b", name, "a", "a"))
    samples = _samples("a", "b", "a", "a")
    for sample in samples:
        sample.rollout_id = 7 + sample.index // 2
    with pytest.raises(BatchError, match="rollout id 7: has samples of the adapters a and b, wanted one"):
        samples_to_train_data(_several(), samples)


@pytest.mark.parametrize(
    ("conversion", "message"),
    [
        ("halved", "2 entries of 4 samples, wanted adapter among the fields"),
        ("turned", "4 entries of 4 samples, wanted adapter among the fields"),
        ("misnamed", "adapter: 'c' .wanted: one of --lora-adapters, a, b"),
        ("too_few_names", "adapter: 1 entries for a batch of 4 samples"),
    ],
)
def test_a_conversion_of_ones_own_that_makes_other_entries_names_their_adapters(conversion, message):
    own = _several(custom_convert_samples_to_train_data_path=f"{__name__}.{conversion}")
    with pytest.raises(BatchError, match=message):
        samples_to_train_data(own, _samples("b", "b", "a", "a"))


def halved(args, samples: list[Sample]):
    """A conversion that leaves every other sample out and does not say whose the rest is."""
    plain = train_config(rollout_batch_size=1)
    return samples_to_train_data(plain, samples[::2])


def turned(args, samples: list[Sample]):
    """A conversion that changes the order."""
    return samples_to_train_data(train_config(), samples[::-1])


def misnamed(args, samples: list[Sample]):
    return {**samples_to_train_data(train_config(), samples), "adapter": ["a", "a", "c", "c"]}


def too_few_names(args, samples: list[Sample]):
    return {**samples_to_train_data(train_config(), samples), "adapter": ["a"]}


def test_a_conversion_of_ones_own_may_say_whose_its_entries_are():
    own = _several(custom_convert_samples_to_train_data_path=f"{__name__}.turned_and_named")
    batch = samples_to_train_data(own, _samples("b", "b", "a", "a"))
    assert batch["adapter"] == ["a", "a", "b", "b"] and batch["sample_indices"] == [3, 2, 1, 0]


def turned_and_named(args, samples: list[Sample]):
    names = [sample.metadata["lora_adapter"] for sample in samples[::-1]]
    return {**turned(args, samples), "adapter": names}
