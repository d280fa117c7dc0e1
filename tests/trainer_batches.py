"""What trainer tests share: the flags a trainer reads, and rollouts split over ranks."""

import json
from argparse import Namespace
from pathlib import Path

import torch

from slime.arguments.groups.critic import of_critic
from slime.training.batch import ADAPTER, ADAPTER_STEPS
from slime.training.schedule import build_dp_schedule
from tests.megatron_harness import make_args
from tests.run_args import with_groups

_FLAGS = {
    **dict(load=None, save=None, save_hf=None, ref_load=None, finetune=False, colocate=False),
    **dict(no_load_optim=None, no_load_rng=None),
    **dict(data_pad_size_multiplier=4, eps_clip_high=0.28, kl_loss_type="k3", overlong_buffer_len=None),
    **dict(rollout_data_postprocess_path=None, custom_megatron_before_log_prob_hook_path=None),
    **dict(custom_megatron_before_train_step_hook_path=None, save_debug_train_data=None),
    **dict(use_dynamic_batch_size=True, max_tokens_per_gpu=64, micro_batch_size=1, rollout_temperature=1.0),
    **dict(replays_nucleus=False),
    **dict(ci_test=False, ci_disable_kl_checker=False, ci_train_rollout_logprob_abs_diff_threshold=0.1),
    **dict(balance_data=False, balance_by_flops=False),
    **dict(optimizer="adam", lr=1e-3, min_lr=0.0, weight_decay=0.1, clip_grad=0.5),
    **dict(adam_beta1=0.9, adam_beta2=0.98, adam_eps=1e-8, lr_decay_style="constant"),
    **dict(num_rollout=10, rollout_batch_size=2, n_samples_per_prompt=4, global_batch_size=8),
}


def trainer_args(hf_checkpoint: Path | str, **overrides) -> Namespace:
    """The ``args`` of a float32 trainer on one GRPO step per rollout; override any of them."""
    return with_groups(vars(make_args(hf_checkpoint, **{**_FLAGS, **overrides})))


def critic_args(hf_checkpoint: Path | str, **overrides) -> Namespace:
    """The ``args`` of a critic on two PPO steps per rollout; its own flags in the form they are given in."""
    of_its_own = dict(critic_lr=2e-3, critic_lr_warmup_iters=0, critic_load=None, critic_save=None)
    ppo = dict(advantage_estimator="ppo", global_batch_size=4, critic_resumes=False, no_load_optim=None)
    return of_critic(trainer_args(hf_checkpoint, **{**ppo, **of_its_own, **overrides}))


def random_rollout(vocab_size: int, num_samples: int = 8, seed: int = 0) -> dict:
    """Samples of various lengths with rewards, partial loss masks and the engine's log-probs."""
    generator = torch.Generator().manual_seed(seed)
    batch: dict = {key: [] for key in ("tokens", "response_lengths", "loss_masks", "rollout_log_probs")}
    for _ in range(num_samples):
        prompt = int(torch.randint(2, 8, (), generator=generator))
        response = int(torch.randint(3, 20, (), generator=generator))
        batch["tokens"].append(torch.randint(vocab_size, (prompt + response,), generator=generator).tolist())
        batch["response_lengths"].append(response)
        mask = (torch.rand(response, generator=generator) < 0.8).int()
        mask[-1] = 1
        batch["loss_masks"].append(mask.tolist())
        batch["rollout_log_probs"].append((-2 - torch.rand(response, generator=generator)).tolist())
    batch["rewards"] = torch.randn(num_samples, generator=generator).tolist()
    batch["raw_reward"] = list(batch["rewards"])
    batch["truncated"] = [0] * num_samples
    batch["sample_indices"] = batch["rollout_ids"] = [*range(num_samples)]
    batch["rollout_mask_sums"] = [sum(mask) for mask in batch["loss_masks"]]
    return batch


def split(args: Namespace, batch: dict, parallel_config: dict) -> dict:
    """The shard of one rank, in the form that `slime.training.conversion` makes."""
    total_lengths = [len(tokens) for tokens in batch["tokens"]]
    schedule = build_dp_schedule(
        args,
        parallel_config,
        total_lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=batch["rollout_ids"],
        adapters=batch.get(ADAPTER),
    )
    rank = parallel_config["dp_rank"]
    partition = schedule.partitions[rank]
    return {
        **{key: [values[i] for i in partition] for key, values in batch.items()},
        "raw_reward": batch["raw_reward"],
        "total_lengths": total_lengths,
        "partition": partition,
        "micro_batch_indices": schedule.micro_batch_indices[rank],
        "num_microbatches": schedule.num_microbatches,
        "global_batch_sizes": schedule.global_batch_sizes,
        ADAPTER_STEPS: schedule.adapter_steps,
    }


def unrecorded(directory: Path) -> set[str]:
    """The files of a checkpoint that no rank has recorded."""
    there = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    records = set(directory.glob("record_*.json"))
    assert records
    for path in records:
        there -= {path.name, *json.loads(path.read_text())["files"]}
    return there
