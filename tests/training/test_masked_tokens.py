"""What stands at tokens that are not trained on changes nothing, not even if it is infinite or no number."""

import math
from copy import deepcopy

import pytest
import torch

from slime.config.run import run_config
from slime.training.conversion import convert_samples_to_train_data
from slime.training.estimators.reinforce_plus_plus import baseline_returns, reinforce_plus_plus_returns
from slime.training.kl import compute_approx_kl, ratio_of, sequence_kl
from slime.training.losses.corrections import icepop_function
from slime.training.losses.reducers import get_sum_of_sample_mean
from slime.training.metrics import rollout_metrics
from slime.training.micro_batches import tensorize
from slime.utils.distributed_utils import distributed_masked_whiten
from slime.utils.types import Sample
from tests.training.cases import flags, make_case, random_case, train

pytestmark = pytest.mark.slow

EXTREMES = [1e4, -1e4, math.inf, -math.inf, math.nan]


def _poisoned(case, value):
    """Masked tokens get any log-prob by engine, old policy and reference, a wild one by the new policy."""
    case = deepcopy(case)
    for number, sample in enumerate(case.samples):
        mask = sample.loss_mask or [1] * sample.response_length
        first = len(sample.tokens) - sample.response_length
        for t, trained in enumerate(mask):
            if trained and not sample.remove_sample:
                continue
            row, token = first + t - 1, sample.tokens[first + t]
            sample.rollout_log_probs[t] = value
            case.logits["ref"][number][row] = value
            case.logits["actor"][number][row] = -value
            case.logits["new"][number][row, token] -= 1e4 if value > 0 else -1e4
    return case


@pytest.fixture(scope="module")
def cases():
    """Random cases and their steps, which are compared with those of every poison."""
    return [(case, train(case)) for case in map(random_case, range(60))]


@pytest.mark.parametrize("value", EXTREMES)
def test_losses_metrics_and_gradients_do_not_see_masked_tokens(cases, value):
    for seed, (case, steps) in enumerate(cases):
        for clean, poisoned in zip(steps, train(_poisoned(case, value)), strict=True):
            assert clean.metrics == poisoned.metrics, f"seed {seed}: {case.args}"
            for number, gradient in clean.gradients.items():
                assert torch.equal(poisoned.gradients[number], gradient), f"seed {seed}: {case.args}"


def multiplying_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: (values * torch.cat(loss_masks)).sum()


def forgetful_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values.sum()


@pytest.mark.parametrize("reducer", ["multiplying_reducer", "forgetful_reducer"])
def test_a_reducer_of_the_users_finds_0_at_masked_tokens(reducer):
    args = flags(
        custom_pg_loss_reducer_function_path=f"{__name__}.{reducer}",
        **dict(eps_clip=0.9, eps_clip_high=9.0),
        use_rollout_logprobs=True,
        rewards_normalization=False,
        global_batch_size=1,
    )
    mask = [1, 0, 1]
    sample = Sample(
        index=0, group_index=0, tokens=[1, 2, 3, 4], response_length=3, loss_mask=mask, reward=0.0
    )
    case = make_case(args, [sample])
    assert train(case)[0].loss == 0  # without a reward trained tokens add nothing, and masked ones never do
    sample.reward = 1.0
    ((clean,), (poisoned,)) = train(case), train(_poisoned(case, math.nan))
    assert clean.metrics == poisoned.metrics
    trained = clean.gradients[0][:3].abs().sum(-1) > 0  # row t predicts token t + 1
    assert trained.tolist() == [True, False, True]
    assert torch.equal(clean.gradients[0], poisoned.gradients[0])


@pytest.mark.parametrize("value", EXTREMES)
def test_sums_over_trained_tokens_do_not_see_the_others(value):
    values, mask = torch.tensor([1.0, value, 3.0]), torch.tensor([1, 0, 1])
    zeros = torch.zeros(3)
    assert get_sum_of_sample_mean([4], [3], [mask])(values) == 2
    assert get_sum_of_sample_mean([4], [3], [mask], calculate_per_token_loss=True)(values) == 4
    assert sequence_kl(values, zeros, mask) == 2
    whitened = distributed_masked_whiten(values, mask)
    assert whitened[[0, 2]].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])
    assert reinforce_plus_plus_returns(5.0, values, mask, 1.0, 1.0).tolist() == [1.0, 2.0, 2.0]


def test_a_metric_of_a_rollout_does_not_see_masked_tokens():
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[0, 1])
    sample.rollout_log_probs = [math.nan, -2.0]
    shard = convert_samples_to_train_data([sample], [0.0], [0.0])
    shard |= {"total_lengths": [3], "partition": [0]}
    metrics = rollout_metrics(tensorize(shard, torch.device("cpu")), num_rollouts=1, group=None)
    assert metrics["rollout/rollout_log_probs"] == -2


def test_a_baseline_return_is_wrong_only_where_its_kl_is():
    shard = {"rewards": [1.0], "kl": [torch.tensor([math.nan, 2.0])]}
    (returns,) = baseline_returns(run_config(flags(kl_coef=0.5)), shard)
    assert returns[1] == 0


def test_ratios_are_exact_up_to_their_bound_and_flat_beyond():
    inside = torch.tensor([-30.0, -1.0, 0.0, 19.99])
    assert torch.equal(ratio_of(inside), inside.exp())
    far = torch.tensor([20.0, 21.0, 1e4, math.inf], requires_grad=True)
    ratio_of(far).sum().backward()
    assert ratio_of(far).tolist() == [pytest.approx(math.e**20, rel=1e-6)] * 4
    assert far.grad.tolist() == [pytest.approx(math.e**20, rel=1e-6), 0, 0, 0]


def test_k3_is_finite_however_far_the_policy_lies_below_its_reference():
    policy = torch.tensor([-19.0, -21.0, -200.0], requires_grad=True)
    kl = compute_approx_kl(policy, torch.zeros(3), "k3")
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([math.e**19 - 20, *[math.e**20 - 21] * 2], rel=1e-6)
    assert policy.grad.tolist() == [pytest.approx(1 - math.e**19, rel=1e-6), 0, 0]
    above = torch.tensor([200.0])
    assert compute_approx_kl(above, torch.zeros(1), "k3").item() == 199


def test_icepop_drops_a_token_whatever_its_loss():
    args = flags(tis_clip=2.0, tis_clip_low=0.5)
    losses = torch.tensor([1.0, math.inf])
    kept, _, metrics = icepop_function(
        args,
        pg_loss=losses,
        train_log_probs=[torch.tensor([0.0, 400.0])],
        rollout_log_probs=[torch.zeros(2)],
        loss_masks=[torch.ones(2)],
    )
    assert kept.tolist() == [1, 0] and metrics["tis"].isfinite().all()
