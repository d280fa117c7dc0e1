"""On-policy distillation with a teacher in the trainer, and one that another has asked."""

import pytest
import torch

from slime.config.run import run_config
from slime.training.advantages import compute_advantages_and_returns
from slime.training.passes import ACTOR_PASSES
from slime.training.versions import TEACHER, TRAINED
from tests.training.cases import VOCAB, flags
from tests.training.tabular import R, TabularBackend, rollout, train


def opd_args(**overrides):
    args = dict(use_opd=True, opd_type="megatron", opd_kl_coef=1.0, rewards_normalization=False)
    args |= dict(global_batch_size=32, max_tokens_per_gpu=100, eps_clip=0.2, eps_clip_high=0.2)
    return flags(**{**args, **overrides})


def kl(student, teacher):
    """KL(student || teacher) of the next token, mean over the last one."""
    p, q = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def backend_with_teacher(args, generator):
    student, teacher = (1.5 * torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    backend = TabularBackend(args, teacher, lr=0.1)
    backend.versions.backup(TEACHER)
    with torch.no_grad():
        backend.table.copy_(student)
    backend.versions.backup(TRAINED)
    return backend, teacher


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_distillation_lowers_the_kl_to_the_teacher_to_a_tenth(estimator):
    generator = torch.Generator().manual_seed(0)
    args = opd_args(advantage_estimator=estimator, normalize_advantages=estimator == "reinforce_plus_plus")
    backend, teacher = backend_with_teacher(args, generator)
    before = kl(backend.table, teacher)
    for rollout_id in range(80):
        train(args, backend, rollout(backend.table, generator), rollout_id)
    assert kl(backend.table, teacher) < 0.1 * before


def test_the_difference_to_the_teacher_comes_off_the_advantages():
    generator = torch.Generator().manual_seed(1)
    args = opd_args(opd_kl_coef=0.5, n_samples_per_prompt=1)
    backend, teacher = backend_with_teacher(args, generator)
    student = backend.table.detach().clone()
    samples = rollout(student, generator)
    batch = train(args, backend, samples)
    order = batch["sample_indices"]
    for position, number in enumerate(order):
        tokens = torch.tensor(samples[number].tokens)
        wanted = [
            table.log_softmax(-1)[tokens[:-1], tokens[1:]] for table in (student.double(), teacher.double())
        ]
        found = batch["opd_reverse_kl"][position]
        torch.testing.assert_close(found.double(), wanted[0] - wanted[1], rtol=1e-5, atol=1e-5)
        assert torch.equal(batch["advantages"][position], -0.5 * found)
        assert torch.equal(batch["returns"][position], torch.zeros(R))


def opd_batch(**more):
    batch = {"rewards": [2.0], "loss_masks": [torch.ones(2)], "log_probs": [torch.tensor([-1.0, -2.0])]}
    return batch | {"teacher_log_probs": [torch.tensor([-3.0, -1.0])]} | more


def test_a_teacher_that_was_asked_before_needs_no_pass():
    args = opd_args(opd_type="sglang", opd_kl_coef=0.1)
    due = [p.tag for p in ACTOR_PASSES if p.when(run_config(args), 1)]
    assert due == [TRAINED]
    batch = opd_batch()
    compute_advantages_and_returns(run_config(args), batch)
    torch.testing.assert_close(batch["advantages"][0], torch.tensor([2 - 0.1 * 2, 2 + 0.1 * 1]))


def test_the_engines_log_probs_stand_for_the_student_where_they_are_the_old_policy():
    batch = opd_batch(rollout_log_probs=[torch.tensor([-3.0, -1.5])])
    compute_advantages_and_returns(run_config(opd_args(use_rollout_logprobs=True)), batch)
    assert batch["opd_reverse_kl"][0].tolist() == [0.0, -0.5]


def own_advantages(args, rollout_data):
    rollout_data["advantages"] = rollout_data["returns"] = (torch.tensor([7.0, 7.0]),)


def test_advantages_of_ones_own_are_distilled_too():
    batch = opd_batch()
    compute_advantages_and_returns(
        run_config(opd_args(custom_advantage_function_path=f"{__name__}.own_advantages")), batch
    )
    assert batch["advantages"][0].tolist() == [5.0, 8.0] and batch["returns"][0].tolist() == [7.0, 7.0]


def test_log_probs_that_are_missing_are_named():
    batch = opd_batch()
    del batch["teacher_log_probs"]
    with pytest.raises(ValueError, match="--use-opd --opd-type sglang: the rollout has no teacher_log_probs"):
        compute_advantages_and_returns(run_config(opd_args(opd_type="sglang")), batch)
    batch = opd_batch()
    del batch["log_probs"]
    with pytest.raises(ValueError, match="no log-probs of the student"):
        compute_advantages_and_returns(run_config(opd_args()), batch)
