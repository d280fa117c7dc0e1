"""MIS against values worked out by hand; ``test_reference`` has the whole loss with random bounds."""

import math

import pytest
import torch

from slime.config.run import run_config
from slime.observability.train_metric_utils import reduce_train_step_metrics
from slime.training.losses.corrections import icepop_function, vanilla_tis_function
from slime.training.losses.reducers import get_sum_of_sample_mean
from slime.training.losses.scaling import loss_function
from slime.training.parallel import ParallelContext
from slime.utils import ppo_utils as ppo
from tests.run_args import run_args


def mis_args(**overrides):
    return run_config(run_args(**{"tis_clip_low": 0.5, **overrides})).off_policy


def weigh(*ratios, masks=None, **overrides):
    """Weights and masks of sequences whose tokens have these ratios of trainer to engine."""
    train = [torch.tensor(values).log() for values in ratios]
    masks = [torch.tensor(mask) for mask in masks or [[1] * len(values) for values in ratios]]
    weights, kept, metrics = ppo.compute_mis_weights(
        mis_args(**overrides),
        train_log_probs=train,
        rollout_log_probs=[torch.zeros_like(values) for values in train],
        loss_masks=masks,
    )
    return [w.tolist() for w in weights], [k.tolist() for k in kept], metrics


TOKENS = [0.25, 1.5, 4.0]


@pytest.mark.parametrize(
    ("mode", "weights", "kept"),
    [
        ("truncate", [0.25, 1.5, 2.0], [1, 1, 1]),
        ("clip", [0.5, 1.5, 2.0], [1, 1, 1]),
        ("mask", [0.0, 1.5, 0.0], [0, 1, 0]),
    ],
)
def test_a_mode_says_what_becomes_of_weights_out_of_bounds(mode, weights, kept):
    found, masks, _ = weigh(TOKENS, tis_mode=mode)
    assert found[0] == pytest.approx(weights) and masks == [kept]


@pytest.mark.parametrize(("level", "weight"), [("sequence", 0.5 * 1.5), ("geometric", (0.5 * 1.5) ** 0.5)])
def test_a_level_says_whose_weight_it_is(level, weight):
    found, _, _ = weigh([0.5, 100.0, 1.5], [1.25], masks=[[1, 0, 1], [1]], tis_level=level)
    assert found[0] == pytest.approx([weight] * 3) and found[1] == pytest.approx([1.25])


def test_a_log_ratio_is_cut_at_20_on_both_sides():
    found, _, _ = weigh([1e-30, 1e30], tis_upper_bound=math.inf)
    assert found[0] == pytest.approx([math.exp(-20), math.exp(20)], rel=1e-5)


@pytest.mark.parametrize(
    ("level", "kept"), [("token", [1, 0, 1]), ("sequence", [0, 0, 0]), ("geometric", [1] * 3)]
)
def test_rejection_looks_at_its_own_level_and_leaves_weights_alone(level, kept):
    found, masks, metrics = weigh([1.5, 4.0, 0.6], use_rs=True, rs_level=level)
    assert masks == [kept] and found[0] == pytest.approx([1.5, 2.0, 0.6])
    assert metrics["masked_fraction"][0].tolist() == [1.0 - k for k in kept]


def test_bounds_belong_to_what_is_kept():
    found, kept, metrics = weigh([0.5, 2.0], tis_mode="mask")
    assert found == [[0.5, 2.0]] and kept == weigh([0.5, 2.0], use_rs=True)[1] == [[1, 1]]
    assert not metrics["tis_above_fraction"][0].any() and not metrics["tis_below_fraction"][0].any()


def test_a_veto_drops_a_whole_sequence_for_one_trained_token():
    call = dict(use_rs=True, rs_lower_bound=0.0, rs_upper_bound=9.0, rs_veto_threshold=1e-3)
    ratios, masks = ([1.0, 1e-4], [1.0, 1e-4], [1.0, 2e-3]), [[1, 1], [1, 0], [1, 1]]
    _, kept, metrics = weigh(*ratios, masks=masks, **call)
    assert kept == [[0, 0], [1, 0], [1, 1]]
    assert [v.tolist() for v in metrics["veto_fraction"]] == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert weigh(*ratios, masks=masks, **call | dict(use_rs=False))[1] == masks
    assert weigh([0.5], **call | dict(rs_veto_threshold=0.5))[1] == [[1]]


@pytest.mark.parametrize(
    ("level", "mean"), [("token", (0.5 + 1.5 + 1.5) / 3), ("sequence", (0.75 + 1.5) / 2)]
)
def test_normalised_weights_have_a_mean_of_1(level, mean):
    ratios, masks = ([0.5, 1.5, 9.0], [1.5], [7.0]), [[1, 1, 0], [1], [0]]
    found, _, _ = weigh(*ratios, masks=masks, tis_level=level, tis_batch_normalize=True)
    assert found[1] == pytest.approx([1.5 / mean])
    small, _, _ = weigh([0.25, 0.75], tis_batch_normalize=True)
    assert small[0] == pytest.approx([0.5, 1.5])


def test_there_is_no_division_by_a_mean_of_0():
    found, _, _ = weigh([4.0], masks=[[1]], tis_mode="mask", tis_batch_normalize=True)
    assert found == [[0.0]]
    assert weigh([1.5], masks=[[0]], tis_batch_normalize=True)[0] == [[1.5]]


def test_the_gap_is_told_as_kl_and_as_perplexities():
    train, rollout = [torch.tensor([-1.0, -2.0, -9.0])], [torch.tensor([-1.5, -1.0, 0.0])]
    found = ppo.gap_metrics(train, rollout, [torch.tensor([1, 1, 0])])
    assert found["kl"][0].tolist() == [-0.5, 1.0, 9.0]
    assert found["k3_kl"][0].tolist() == pytest.approx([math.exp(0.5) - 1.5, math.exp(-1), math.exp(-9) + 8])
    assert found["training_log_ppl"][0].tolist() == [1.5] * 3 and found["rollout_log_ppl"][0][0] == 1.25
    assert found["training_ppl"][0][0].item() == pytest.approx(math.exp(1.5))
    assert found["rollout_ppl"][0][0].item() == pytest.approx(math.exp(1.25))
    assert found["log_ppl_diff"][0][0] == -0.25 and found["log_ppl_abs_diff"][0][0] == 0.25
    assert found["ppl_ratio"][0][0].item() == pytest.approx(math.exp(0.25))
    alone = ppo.gap_metrics(train, rollout, [torch.tensor([0, 1, 0])])
    assert alone["training_log_ppl"][0][0] == 2.0 and alone["rollout_log_ppl"][0][0] == 1.0


@pytest.mark.parametrize("per_token", [88.0, 95.0, 400.0])
def test_perplexities_are_finite_beyond_what_float32_holds(per_token):
    """Up to the metrics of a step, which are summed over samples."""
    train, rollout = [torch.full((3,), -per_token)] * 2, [torch.full((3,), -1.0)] * 2
    masks = [torch.ones(3)] * 2
    reduce = get_sum_of_sample_mean([4, 4], [3, 3], masks)

    def loss(batch, logits, reducer):
        found = ppo.gap_metrics(train, rollout, masks)
        return logits.sum(), {name: reduce(torch.cat(values)) for name, values in found.items()}

    batch = {"total_lengths": [4, 4], "response_lengths": [3, 3], "loss_masks": masks}
    config = run_config(run_args()).loss
    report = loss_function(config, batch, 1, 2, loss, torch.zeros(1, 1, 1), ParallelContext())[2]
    found = reduce_train_step_metrics(
        [report], calculate_per_token_loss=False, step_global_batch_size=2, cp_size=1, dp_with_cp_group=None
    )
    # The weights of the reducer are float32.
    assert found["training_ppl"] == pytest.approx(math.exp(per_token), rel=1e-6)
    assert found["ppl_ratio"] == pytest.approx(math.exp(per_token - 1), rel=1e-6)
    assert found["rollout_ppl"] == pytest.approx(math.e)
    assert found["training_log_ppl"] == pytest.approx(per_token)


def test_perplexities_beyond_float64_are_cut_off():
    found = ppo.gap_metrics([torch.full((2,), -1e4)], [torch.full((2,), -1.0)], [torch.ones(2)])
    # As Python's numbers: a float32 infinity would be equal to anything that float32 does not hold.
    told = [found[name][0][0].item() for name in ("training_ppl", "ppl_ratio")]
    assert told == pytest.approx([math.exp(700)] * 2)
    assert found["training_log_ppl"][0][0] == 1e4 and found["log_ppl_diff"][0][0] == 1 - 1e4


def as_correction(ratios, **overrides):
    return {
        "args": mis_args(**overrides),
        "pg_loss": torch.ones(len(ratios), requires_grad=True),
        "train_log_probs": [torch.tensor(ratios).log().requires_grad_()],
        "rollout_log_probs": [torch.zeros(len(ratios))],
        "loss_masks": [torch.ones(len(ratios))],
        "total_lengths": [len(ratios) + 1],
        "response_lengths": [len(ratios)],
    }


def test_the_weight_has_no_gradient_and_metrics_have_a_prefix():
    call = as_correction([0.75, 4.0])
    corrected, masks, metrics = ppo.mis_function(**call)
    corrected.sum().backward()
    assert call["pg_loss"].grad.tolist() == [0.75, 2.0] and masks[0].tolist() == [1, 1]
    assert call["train_log_probs"][0].grad is None
    assert all(name.startswith("mis_") and not value.requires_grad for name, value in metrics.items())


def test_at_the_level_of_tokens_it_is_tis_or_icepop():
    clipped = ppo.mis_function(**as_correction(TOKENS, tis_mode="clip"))
    assert torch.equal(clipped[0], vanilla_tis_function(**as_correction(TOKENS))[0])
    loss, masks, _ = ppo.mis_function(**as_correction(TOKENS, tis_mode="mask"))
    assert torch.equal(loss * masks[0], icepop_function(**as_correction(TOKENS))[0])


def test_weights_are_of_the_trainer_over_the_engine():
    call = as_correction([1.5])
    call["rollout_log_probs"] = [torch.tensor([0.5])]
    corrected, _, metrics = ppo.mis_function(**call)
    assert corrected.item() == pytest.approx(1.5 * math.exp(-0.5))
    assert metrics["mis_training_ppl"].item() == pytest.approx(1 / 1.5)


def test_a_mean_that_is_given_is_used():
    call = as_correction([1.5], tis_batch_normalize=True)
    assert ppo.mis_function(**call, mean_weight=[3.0])[0].item() == 0.5
