"""Losses, reducers, advantages and packing as functions of tensors, in one process."""

import pytest
import torch

from slime.backends.megatron_utils import loss as face
from slime.backends.megatron_utils.data import DataIterator, get_batch
from slime.config.run import run_config
from slime.training.advantages import compute_advantages_and_returns
from slime.training.log_probs import response_log_probs
from slime.training.losses.policy import OWN_LOG_PROBS, policy_loss_function
from slime.training.losses.reducers import get_sum_of_sample_mean
from slime.training.losses.scaling import loss_function
from slime.training.losses.sft import sft_loss_function
from slime.training.micro_batches import tensorize
from slime.training.parallel import ParallelContext
from slime.training.passes import needs_own_log_probs
from slime.training.trainer import select_loss
from slime.training.vocab_parallel import vocab_parallel_log_prob_entropy
from tests.megatron_harness import make_args, run_ranks, save_tiny_hf
from tests.run_args import run_args
from tests.trainer_batches import _FLAGS, random_rollout, split

VOCAB = 32
ALONE = ParallelContext()


def _args(**overrides):
    return run_args(**{**_FLAGS, "vocab_size": VOCAB, **overrides})


def _micro_batch(keys=(), pad_multiple=8, **extra):
    """All samples of a random rollout in one micro-batch, with ``extra`` per-sample values."""
    args = _args(max_tokens_per_gpu=10_000)
    shard = split(args, random_rollout(VOCAB), {**ALONE_CONFIG, "dp_rank": 0})
    batch = tensorize(shard, torch.device("cpu")) | extra
    return batch, get_batch(DataIterator(batch, batch["micro_batch_indices"]), keys, pad_multiple)


ALONE_CONFIG = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def _logits(micro_batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, micro_batch["tokens"].size(1), VOCAB, generator=generator)


def _brute_force(micro_batch, logits, temperature=1.0):
    """Per sample log-probs and entropies of the response tokens, position by position."""
    log_probs, entropies, start = [], [], 0
    for tokens, response in zip(micro_batch["unconcat_tokens"], micro_batch["response_lengths"], strict=True):
        p = (logits[0, start : start + len(tokens)] / temperature).log_softmax(-1)
        rows = p[len(tokens) - response - 1 : len(tokens) - 1]
        log_probs.append(
            torch.stack([row[token] for row, token in zip(rows, tokens[-response:], strict=True)])
        )
        entropies.append(-(rows.exp() * rows).sum(-1))
        start += len(tokens)
    return log_probs, entropies


def test_packing_keeps_sequences_and_pads_with_one_more():
    batch, micro_batch = _micro_batch(pad_multiple=64)
    lengths = batch["total_lengths"]
    boundaries = micro_batch["packed_seq_params"].cu_seqlens_q.tolist()
    assert micro_batch["tokens"].size(1) % 64 == 0 and boundaries[-1] == micro_batch["tokens"].size(1)
    assert boundaries[: len(lengths) + 1] == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert micro_batch["full_loss_masks"].shape == micro_batch["tokens"].shape
    assert micro_batch["full_loss_masks"].sum() == sum(mask.sum() for mask in batch["loss_masks"])


def test_a_sample_with_a_wrong_length_is_refused_by_name():
    shard = split(_args(), random_rollout(VOCAB), {**ALONE_CONFIG, "dp_rank": 0})
    shard["rollout_log_probs"][0] = shard["rollout_log_probs"][0][1:]
    with pytest.raises(ValueError, match=f"sample {shard['sample_indices'][0]}: lengths"):
        tensorize(shard, torch.device("cpu"))


@pytest.mark.parametrize("chunk", [-1, 7])
def test_log_probs_and_entropies_are_those_of_the_response(chunk):
    _, micro_batch = _micro_batch()
    logits = _logits(micro_batch)
    args = _args(rollout_temperature=0.7, log_probs_chunk_size=chunk)
    found = response_log_probs(args, logits, micro_batch, ALONE)
    for mine, expected in zip(found, _brute_force(micro_batch, logits, 0.7), strict=True):
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_padding_rows_of_the_vocabulary_have_no_probability():
    _, micro_batch = _micro_batch()
    logits = _logits(micro_batch)
    padded = torch.cat([logits, torch.full_like(logits[..., :5], 9.0)], -1)
    for a, b in zip(
        response_log_probs(_args(), padded, micro_batch, ALONE),
        response_log_probs(_args(), logits, micro_batch, ALONE),
        strict=True,
    ):
        torch.testing.assert_close(torch.cat(a), torch.cat(b))


def test_gradients_of_log_prob_and_entropy():
    logits = torch.randn(5, 9, dtype=torch.double, requires_grad=True)
    targets = torch.randint(9, (5,))

    def both(z):
        return vocab_parallel_log_prob_entropy(z, targets, None, entropy_gradient=True)

    assert torch.autograd.gradcheck(both, (logits,))


def test_the_entropy_that_a_loss_of_the_users_adds_is_differentiated():
    _, micro_batch = _micro_batch()
    logits = _logits(micro_batch).double().requires_grad_()
    _, entropies = response_log_probs(_args(), logits, micro_batch, ALONE)
    _, expected = _brute_force(micro_batch, logits)
    found, wanted = (torch.autograd.grad(torch.cat([*e]).sum(), logits)[0] for e in (entropies, expected))
    assert wanted.any()
    torch.testing.assert_close(found, wanted)


def _losses_of_user_code(rank, checkpoint, logits):
    """Computes the losses as a plug-in does: without a context."""
    from slime.backends.megatron_utils.initialize import init

    init(run_config(make_args(checkpoint, tensor_model_parallel_size=2)))
    _, micro_batch = _micro_batch(keys=("rollout_log_probs",))
    local = logits.chunk(2, -1)[rank].clone().requires_grad_()
    loss, _ = sft_loss_function(run_config(_args()), micro_batch, local, lambda values: values.mean())
    loss.backward()
    return loss.detach(), local.grad


def test_a_loss_without_a_context_knows_the_other_ranks(tmp_path):
    logits = _logits(_micro_batch()[1]).requires_grad_()
    loss, _ = sft_loss_function(
        run_config(_args()), _micro_batch()[1], logits, lambda values: values.mean(), ALONE
    )
    loss.backward()
    halves = run_ranks(_losses_of_user_code, 2, save_tiny_hf(tmp_path, "qwen3"), logits.detach())
    for found, _ in halves:
        torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in halves], -1), logits.grad)


def _tp_log_probs(rank, logits, targets):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    local = logits.chunk(2, -1)[rank].clone().requires_grad_()
    group = torch.distributed.group.WORLD
    log_probs, entropy = vocab_parallel_log_prob_entropy(local, targets, group, entropy_gradient=True)
    (log_probs.sum() + 2 * entropy.sum()).backward()
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "gradient": local.grad}


def test_a_split_vocabulary_changes_nothing():
    logits, targets = torch.randn(6, 8, requires_grad=True), torch.randint(8, (6,))
    log_probs, entropy = vocab_parallel_log_prob_entropy(logits, targets, None, entropy_gradient=True)
    (log_probs.sum() + 2 * entropy.sum()).backward()
    halves = run_ranks(_tp_log_probs, 2, logits.detach(), targets)
    for half in halves:
        torch.testing.assert_close(half["log_probs"], log_probs.detach())
        torch.testing.assert_close(half["entropy"], entropy.detach())
    torch.testing.assert_close(torch.cat([half["gradient"] for half in halves], -1), logits.grad)


def test_sample_mean_divides_by_the_mask_total_of_the_whole_rollout():
    masks = [torch.tensor([1, 1]), torch.tensor([0, 1, 0])]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert get_sum_of_sample_mean([3, 4], [2, 3], masks)(values) == 1.5 + 4
    assert get_sum_of_sample_mean([3, 4], [2, 3], masks, [4, 0])(values) == 0.75 + 4
    assert get_sum_of_sample_mean([3, 4], [2, 3], masks, calculate_per_token_loss=True)(values) == 7


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_estimators_broadcast_the_reward(estimator):
    batch, _ = _micro_batch()
    compute_advantages_and_returns(run_config(_args(advantage_estimator=estimator)), batch, ALONE)
    for reward, advantages, length in zip(
        batch["rewards"], batch["advantages"], batch["response_lengths"], strict=True
    ):
        assert advantages.tolist() == pytest.approx([reward] * length)


def test_kl_in_the_reward_lowers_baseline_advantages():
    batch, _ = _micro_batch()
    batch["log_probs"] = [torch.full_like(x, -1.0) for x in batch["rollout_log_probs"]]
    batch["ref_log_probs"] = [torch.full_like(x, -1.5) for x in batch["rollout_log_probs"]]
    args = _args(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1, kl_loss_type="k1")
    compute_advantages_and_returns(run_config(args), batch, ALONE)
    assert batch["kl"][0][0] == 0.5
    assert batch["advantages"][0][0].item() == pytest.approx(batch["rewards"][0] - 0.05)


def test_whitened_advantages_have_mean_zero_and_variance_one_where_trained():
    batch, _ = _micro_batch()
    compute_advantages_and_returns(run_config(_args(normalize_advantages=True)), batch, ALONE)
    trained = torch.cat(batch["advantages"])[torch.cat(batch["loss_masks"]).bool()]
    assert trained.mean().item() == pytest.approx(0, abs=1e-5)
    assert trained.var().item() == pytest.approx(1, abs=1e-4)


def custom_advantages(args, rollout_data):
    rollout_data["returns"] = rollout_data["advantages"] = [kl + 3 for kl in rollout_data["kl"]]


def forgetful_advantages(args, rollout_data):
    rollout_data["returns"] = []


def test_custom_advantages_replace_the_estimator():
    batch, _ = _micro_batch()
    compute_advantages_and_returns(
        run_config(_args(custom_advantage_function_path=f"{__name__}.custom_advantages")), batch, ALONE
    )
    assert set(torch.cat(batch["advantages"]).tolist()) == {3.0}
    batch, _ = _micro_batch()
    with pytest.raises(ValueError, match="did not set advantages"):
        path = f"{__name__}.forgetful_advantages"
        compute_advantages_and_returns(run_config(_args(custom_advantage_function_path=path)), batch, ALONE)


def _loss(args, num_microbatches=1, keys=("advantages", "rollout_log_probs", "rollout_mask_sums"), **extra):
    batch, _ = _micro_batch()
    compute_advantages_and_returns(run_config(_args()), batch, ALONE)
    batch |= extra
    iterator = DataIterator(batch, batch["micro_batch_indices"])
    micro_batch = get_batch(iterator, [*keys, *extra], 8)
    logits = _logits(micro_batch).requires_grad_()
    loss, normaliser, report = loss_function(
        args, micro_batch, num_microbatches, 8, select_loss(run_config(args)), logits, ALONE
    )
    metrics = dict(zip(report["keys"], report["values"][1:].tolist(), strict=True))
    return loss, normaliser, metrics, micro_batch, logits


def _masked_mean(micro_batch, values):
    return sum(
        ((v * m).sum() / m.sum()).item() for v, m in zip(values, micro_batch["loss_masks"], strict=True)
    )


def test_without_old_log_probs_the_ratio_is_one():
    loss, _, metrics, micro_batch, _ = _loss(_args())
    assert metrics["ppo_kl"] == 0 and metrics["pg_clipfrac"] == 0
    assert metrics["pg_loss"] == pytest.approx(
        -_masked_mean(micro_batch, micro_batch["advantages"]), abs=1e-5
    )
    assert loss.item() == pytest.approx(metrics["loss"] / 8, abs=1e-6)


def test_the_gap_to_the_engine_is_reported():
    _, _, metrics, micro_batch, logits = _loss(_args())
    log_probs, entropies = _brute_force(micro_batch, logits.detach())
    gaps = [(a - b).abs() for a, b in zip(log_probs, micro_batch["rollout_log_probs"], strict=True)]
    expected = _masked_mean(micro_batch, gaps)
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(expected, rel=1e-4)
    assert metrics["entropy_loss"] == pytest.approx(_masked_mean(micro_batch, entropies), rel=1e-4)


def test_kl_loss_is_added_with_its_coefficient():
    batch, _ = _micro_batch()
    ref = [x - 0.5 for x in batch["rollout_log_probs"]]
    flags = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k2"}
    _, _, metrics, micro_batch, logits = _loss(_args(**flags), ref_log_probs=ref)
    log_probs, _ = _brute_force(micro_batch, logits.detach())
    kl = _masked_mean(micro_batch, [(a - b) ** 2 / 2 for a, b in zip(log_probs, ref, strict=True)])
    assert metrics["kl_loss"] == pytest.approx(kl, rel=1e-4)
    assert metrics["loss"] == pytest.approx(metrics["pg_loss"] + 0.5 * kl, rel=1e-4)


def test_tis_weights_the_policy_gradient_and_reports_itself():
    _, _, plain, micro_batch, logits = _loss(_args())
    _, _, metrics, _, _ = _loss(_args(use_tis=True, tis_clip=1.5, tis_clip_low=0.1))
    log_probs, _ = _brute_force(micro_batch, logits.detach())
    weights = [(a - b).exp() for a, b in zip(log_probs, micro_batch["rollout_log_probs"], strict=True)]
    expected = [-a * w.clamp(0.1, 1.5) for a, w in zip(micro_batch["advantages"], weights, strict=True)]
    assert metrics["pg_loss"] == pytest.approx(_masked_mean(micro_batch, expected), rel=1e-3, abs=1e-5)
    assert metrics["tis"] == pytest.approx(_masked_mean(micro_batch, weights), rel=1e-3)
    assert {"ois", "tis_abs", "tis_clipfrac"} <= metrics.keys() - plain.keys()


def correction_that_looks(args, pg_loss, train_log_probs, loss_masks, **_):
    assert pg_loss.requires_grad and not any(values.requires_grad for values in train_log_probs)
    return pg_loss * 3, [mask * 0 for mask in loss_masks[:-1]] + loss_masks[-1:], {"mine": pg_loss}


def test_a_correction_of_the_users_decides_on_losses_and_masks_and_gets_no_gradients():
    path = f"{__name__}.correction_that_looks"
    _, _, metrics, micro_batch, _ = _loss(
        _args(use_tis=True, custom_tis_function_path=path, tis_function_path=path)
    )
    plain = [-a for a in micro_batch["advantages"]]
    last = (plain[-1] * micro_batch["loss_masks"][-1]).sum() / micro_batch["loss_masks"][-1].sum()
    assert metrics["pg_loss"] == pytest.approx(3 * float(last), rel=1e-5)
    # Metrics of its own are over what is trained, whatever it masks.
    assert metrics["mine"] == pytest.approx(_masked_mean(micro_batch, plain), abs=1e-5)


def correction_of_a_part(args, pg_loss, loss_masks, **_):
    return pg_loss[:1], loss_masks, {}


def test_a_correction_that_gives_back_a_part_is_refused_by_name():
    path = f"{__name__}.correction_of_a_part"
    with pytest.raises(ValueError, match=rf"{path}: pg_loss \[1\], wanted \[\d+\] as given"):
        _loss(_args(use_tis=True, tis_function_path=path))


def _trainable():
    """A micro-batch with advantages, and logits."""
    batch, _ = _micro_batch()
    compute_advantages_and_returns(run_config(_args()), batch, ALONE)
    keys = ("advantages", "rollout_log_probs", "rollout_mask_sums")
    micro_batch = get_batch(DataIterator(batch, batch["micro_batch_indices"]), keys, 8)
    return micro_batch, _logits(micro_batch).requires_grad_()


@pytest.mark.parametrize("function", [policy_loss_function, sft_loss_function])
def test_metrics_keep_no_graph(function):
    micro_batch, logits = _trainable()
    loss, metrics = function(run_config(_args()), micro_batch, logits, torch.sum, ALONE)
    assert loss.requires_grad and not any(value.requires_grad for value in metrics.values())
    attached = lambda *_: (loss, {"loss": loss})
    report = loss_function(_args(), micro_batch, 1, 1, attached, logits, ALONE)[2]
    assert report["values"].tolist() == [0.0, loss.item()] and not report["values"].requires_grad


def test_a_mean_is_scaled_so_that_micro_batches_and_ranks_average_to_it():
    micro_batch, logits = _trainable()
    scaled = [
        loss_function(_args(), micro_batch, 3, 6, lambda *_: (logits.sum() * 0 + 4, {}), logits, context)
        for context in (ALONE, ParallelContext(dp_size=2))
    ]
    assert [loss.item() for loss, _, _ in scaled] == [4 * 3 / 6, 4 * 3 / 6 * 2]
    assert [normaliser.item() for _, normaliser, _ in scaled] == [1, 1]


@pytest.mark.parametrize(("recompute", "calls"), [(False, 1), (True, 2)])
def test_a_loss_is_computed_again_in_the_backward_pass_where_that_is_asked_for(recompute, calls):
    micro_batch, logits = _trainable()
    seen = []

    def counted(batch, logits, reducer):
        seen.append(torch.is_grad_enabled())
        return logits.exp().sum(), {}

    args = _args(recompute_loss_function=recompute)
    loss_function(args, micro_batch, 1, 1, counted, logits, ALONE)[0].backward()
    assert seen == [True] * calls


def test_per_token_loss_is_a_sum_with_its_tokens_as_normaliser():
    loss, normaliser, metrics, micro_batch, logits = _loss(
        _args(loss_type="sft_loss", calculate_per_token_loss=True)
    )
    log_probs, _ = _brute_force(micro_batch, logits.detach())
    expected = -sum((a * m).sum().item() for a, m in zip(log_probs, micro_batch["loss_masks"], strict=True))
    assert normaliser.item() == sum(int(mask.sum()) for mask in micro_batch["loss_masks"])
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)


def constant_loss(args, batch, logits, sum_of_sample_mean):
    return logits.sum() * 0 + 7, {"seven": torch.tensor(7.0)}


def loss_of_dtype(args, batch, logits, sum_of_sample_mean):
    return logits.sum(), {"bytes": torch.tensor(float(logits.dtype.itemsize))}


def first_token_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values[0]


def test_custom_losses_and_reducers_are_called():
    loss, _, metrics, _, _ = _loss(
        _args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.constant_loss")
    )
    assert metrics == {"seven": 7.0} and loss.item() == pytest.approx(7 / 8)
    _, _, metrics, micro_batch, _ = _loss(
        _args(custom_pg_loss_reducer_function_path=f"{__name__}.first_token_reducer")
    )
    assert metrics["pg_loss"] == pytest.approx(-micro_batch["advantages"][0][0].item())


def test_a_loss_of_the_users_own_gets_logits_in_float32():
    """As those of the original do; ours take the model's."""
    args = _args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.loss_of_dtype")
    logits = torch.ones(1, 2, 3, dtype=torch.bfloat16, requires_grad=True)
    loss, metrics = select_loss(run_config(args))({}, logits, sum)
    assert loss.dtype == torch.float32 and metrics["bytes"] == 4
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16 and torch.equal(logits.grad, torch.ones_like(logits))


def test_recomputing_the_loss_does_not_change_it():
    gradients = []
    for recompute in (False, True):
        loss, _, _, _, logits = _loss(_args(recompute_loss_function=recompute, entropy_coef=0.1))
        loss.backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "overrides",
    [{"advantage_estimator": name} for name in ("grpo", "gspo", "cispo")]
    + [{"use_opsm": True}, {"use_tis": True}, {"use_kl_loss": True, "use_unbiased_kl": True}],
    ids=str,
)
def test_one_step_needs_no_pass_for_the_log_probs_that_it_finds_itself(overrides):
    """What the loss makes of log-probs of a pass before it, and of none, is the same to the last bit."""
    args = _args(**overrides, kl_loss_coef=0.1)
    _, micro_batch = _micro_batch()
    values, _ = response_log_probs(args, _logits(micro_batch), micro_batch, ALONE)
    reference = {"ref_log_probs": [value - 0.3 for value in values]}
    found = [_loss(args, **reference, **extra) for extra in ({}, {"log_probs": values})]
    for loss, _, _, _, logits in found:
        loss.backward()
        assert logits.grad.any()
    own = found[0][2].pop(OWN_LOG_PROBS)  # which the pass would have told
    assert own == pytest.approx(_masked_mean(micro_batch, values))
    assert found[0][2] == found[1][2]
    assert torch.equal(found[0][4].grad, found[1][4].grad)


@pytest.mark.parametrize(
    ("overrides", "steps", "needed"),
    [
        ({}, 1, False),
        ({}, 2, True),
        ({"advantage_estimator": "gspo"}, 1, False),
        ({"advantage_estimator": "gspo"}, 2, True),
        ({"kl_coef": 0.1}, 1, True),
        ({"use_rollout_entropy": True}, 1, True),
        ({"ci_test": True}, 1, True),
        ({"custom_megatron_before_log_prob_hook_path": "my.hook"}, 1, True),
        ({"use_opd": True, "opd_type": "megatron"}, 1, True),
        ({"keep_old_actor": True}, 1, True),
        ({"get_mismatch_metrics": True}, 1, True),
        ({"use_tis": True, "tis_needs_mean": True}, 1, True),
        ({"records_routes": True}, 1, True),
        ({"loss_type": "custom_loss"}, 1, True),
        ({"custom_advantage_function_path": "my.advantages"}, 1, True),
        ({"rollout_data_postprocess_path": "my.hook"}, 1, True),
        ({"use_rollout_logprobs": True}, 2, False),
        ({"use_rollout_logprobs": True, "get_mismatch_metrics": True}, 1, True),
    ],
)
def test_log_probs_are_computed_only_where_something_reads_them(overrides, steps, needed):
    assert needs_own_log_probs(run_config(_args(**overrides)), steps) is needed


def seen_by_a_hook(args, *, pg_loss, loss_masks, **_):
    return pg_loss * args.n_samples_per_prompt, loss_masks, {}


def test_faces_and_hooks_take_the_flat_args():
    """What a plug-in calls with ``args``, the trainer calls with the configuration."""
    _, micro_batch = _micro_batch(keys=("rollout_log_probs",))
    path = f"{__name__}.{seen_by_a_hook.__name__}"
    once, thrice = (
        _args(use_tis=True, custom_tis_function_path=path, n_samples_per_prompt=count) for count in (1, 3)
    )
    batch = micro_batch | {"rewards": [1.0] * len(micro_batch["loss_masks"])}
    face.compute_advantages_and_returns(once, batch)
    logits = _logits(batch)
    found = face.policy_loss_function(thrice, batch, logits, torch.sum)[1]
    wanted = policy_loss_function(run_config(once), batch, logits, torch.sum, ALONE)[1]
    assert found["entropy_loss"] == wanted["entropy_loss"] and wanted["pg_loss"] != 0
    torch.testing.assert_close(found["pg_loss"], 3 * wanted["pg_loss"])
