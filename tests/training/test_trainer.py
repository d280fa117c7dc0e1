"""Roles, and what passes from one to another."""

from dataclasses import replace

import pytest
import torch

from slime.config.run import run_config
from slime.observability.timer import Timer
from slime.ray.train_worker import TrainWorker
from slime.training.batch import loss_fields
from slime.training.micro_batches import tensorize
from slime.training.passes import Pass, log_probs
from slime.training.roles import ACTOR
from slime.training.trainer import Trainer
from slime.training.versions import TRAINED
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args
from tests.training.cases import VOCAB
from tests.training.cases import flags as flags_of
from tests.training.tabular import TabularBackend, rollout, train

SCORER = replace(
    ACTOR,
    passes=(Pass("scores", TRAINED, "scored_", log_probs, lambda config, num_steps: True),),
    outputs=("scored_log_probs",),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _loss_that_reads_what_was_given(args, batch, logits, sum_of_sample_mean):
    given = torch.cat(batch["scored_log_probs"])
    loss = sum_of_sample_mean(given) + 0 * logits.sum()
    return loss, {"loss": loss.detach()}


def _two_roles(rank, args):
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, random_rollout(256), worker.parallel_config())
    scorer = Trainer(run_config(args), SCORER, worker.backend, Timer())
    given = scorer.train(0, tensorize(shard, worker.backend.device)).outputs
    args.loss_type, args.custom_loss_function_path = "custom_loss", f"{__name__}.{_LOSS}"
    receiver = Trainer(run_config(args), ACTOR, worker.backend, Timer())
    batch = tensorize(shard, worker.backend.device)
    trained = receiver.train(1, batch, given)
    expected = sum(
        (values * mask).sum() / mask.sum()
        for values, mask in zip(given["scored_log_probs"], batch["loss_masks"], strict=True)
    )
    return {
        "steps": trained.steps,
        "expected": float(expected) / len(batch["tokens"]),
        "outputs": trained.outputs,
    }


_LOSS = _loss_that_reads_what_was_given.__name__


def test_what_a_pass_of_one_role_computes_reaches_the_loss_of_another(checkpoint):
    (result,) = run_ranks(_two_roles, 1, trainer_args(checkpoint))
    (step,) = result["steps"]
    assert step["train/loss"] == pytest.approx(result["expected"], rel=1e-5)
    assert result["outputs"] == {}


def _mask_the_first_token(args, rollout_id, rollout_data):
    for mask in rollout_data["loss_masks"]:
        mask[0] = 0


def _mean_weights(rank, args):
    worker = TrainWorker(args)
    worker.start()
    shard = split(args, random_rollout(256), worker.parallel_config())
    batch = tensorize(shard, worker.backend.device)
    worker._trainer.train(0, batch)
    return {key: batch[key] for key in ("mean_weight", "log_probs", "rollout_log_probs", "loss_masks")}


def test_the_mean_weight_is_that_of_the_tokens_that_a_hook_has_left(checkpoint):
    args = trainer_args(checkpoint, use_tis=True, tis_needs_mean=True, tis_batch_normalize=True)
    args.rollout_data_postprocess_path = f"{__name__}.{_mask_the_first_token.__name__}"
    args.tis_function_path = "slime.training.losses.mis.mis_function"
    vars(args).update(tis_level="token", tis_mode="truncate", tis_lower_bound=0.5, tis_upper_bound=2.0)
    (found,) = run_ranks(_mean_weights, 1, args)
    gap = torch.cat(found["log_probs"]).double() - torch.cat(found["rollout_log_probs"]).double()
    weights = gap.exp().clamp(max=2.0)[torch.cat(found["loss_masks"]) != 0]
    assert found["mean_weight"] == pytest.approx([float(weights.mean())] * 8, rel=1e-5)


@pytest.mark.parametrize("steps", [1, 4])
def test_log_probs_before_and_after_the_steps_are_recorded_and_change_nothing(steps):
    def trained(**flags):
        generator = torch.Generator().manual_seed(0)
        args = flags_of(global_batch_size=32 // steps, rewards_normalization=False, **flags)
        backend = TabularBackend(args, torch.randn(VOCAB, VOCAB, generator=generator), lr=0.1)
        first, samples = backend.table.detach().clone(), rollout(backend.table, generator)
        for sample in samples:
            sample.reward = float(sample.index % 2)
        return backend, first, train(args, backend, samples)

    def log_probs(table, tokens):
        return table.detach().log_softmax(-1)[tokens[:-1], tokens[1:]]

    backend, first, batch = trained(save_debug_log_probs=True)
    for name, table in (("before_log_probs", first), ("after_log_probs", backend.table)):
        for values, tokens in zip(batch[name], batch["tokens"], strict=True):
            torch.testing.assert_close(values, log_probs(table, tokens), rtol=0, atol=1e-6)
    plain, _, without = trained()
    assert torch.equal(plain.table, backend.table) and not torch.equal(plain.table, first)
    recorded = {"before_log_probs", "after_log_probs"}
    assert batch.keys() - without.keys() == recorded and not recorded & set(loss_fields(batch))
