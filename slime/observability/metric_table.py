"""Every metric that a run writes: `METRICS`, of which ``tools/generate_metric_docs.py`` makes a page.

A name has ``<word>`` where any text may stand, and ``{a,b}`` for one of the words.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache

from slime.observability.jsonl import RESERVED_KEYS
from slime.observability.metric import COUNT, SAMPLES, STEP, SUM, TOKENS, Metric
from slime.observability.rollout_metric_rows import ROLLOUTS

METRICS: dict[str, tuple[Metric, ...]] = {
    "Rollouts": ROLLOUTS,
    "Optimizer steps": (
        Metric("train/step", "number of the optimizer step", "", "", ""),
        Metric("train/{,critic-}loss", "what is minimised; of a policy near 0 by construction", "", STEP, ""),
        Metric("train/{,critic-}grad_norm", "before clipping", "", STEP, "no spikes"),
        Metric("train/{,critic-}lr-pg_<group>", "learning rate of a group of parameters", "", STEP, ""),
        Metric("train/{,critic-}global_batch_size", "of the step", "samples", STEP, ""),
        Metric(
            "train/{,critic-}num_zeros_in_grad",
            "whose gradient is 0 (--log-num-zeros-in-grad)",
            "parameters",
            STEP,
            "",
        ),
        Metric("train/pg_loss", "policy gradient alone", "", TOKENS, ""),
        Metric("train/entropy_loss", "entropy of the policy", "nats", TOKENS, "above 0; slowly falling"),
        Metric("train/pg_clipfrac", "tokens that were clipped", "part", TOKENS, "below 0.2"),
        Metric(
            "train/ppo_kl",
            "movement since the rollout's log-probs; 0 at its first step",
            "nats",
            TOKENS,
            "below 0.1",
        ),
        Metric("train/kl_loss", "KL to the reference in the loss", "nats", TOKENS, "bounded"),
        Metric(
            "train/train_rollout_logprob_abs_diff",
            "gap between trainer and engine",
            "nats",
            TOKENS,
            "below 1e-5 in float32, 0.01 in bfloat16",
        ),
        Metric("train/opsm_clipfrac", "tokens that --use-opsm drops", "part", TOKENS, "no spikes"),
        Metric(
            "train/ois",
            "probability of a token now over that before the steps, with a correction",
            "",
            TOKENS,
            "1",
        ),
        Metric(
            "train/{tis,tis_abs,tis_clipfrac}",
            "weight of --use-tis, its distance from 1, part out of bounds",
            "",
            TOKENS,
            "1; 0; 0",
        ),
        Metric(
            "train/mis_<name>",
            "weights of MIS before and after their bounds, parts masked and vetoed",
            "",
            TOKENS,
            "",
        ),
        Metric(
            "train/{moe_load_balancing_loss,moe_z_loss,mtp_loss}",
            "of routers, and of MTP layers",
            "",
            STEP,
            "",
        ),
        Metric(
            "train/adapter/<name>/<metric>",
            "any of these, of [one adapter](lora.md#several-adapters) of several",
            "",
            STEP,
            "as there",
        ),
        Metric("train/mtp_<depth>_loss", "of one MTP layer", "", STEP, ""),
        Metric(
            "train/critic-{value_loss,value_clipfrac}",
            "error of the critic; part that was clipped",
            "",
            TOKENS,
            "falls",
        ),
    ),
    "Time and throughput": (
        Metric("perf/step_time", "the whole step", "s", "", ""),
        Metric(
            "perf/wait_time_ratio",
            "in which the trainer waited for a rollout",
            "part",
            "step",
            "near 0 with --async",
        ),
        Metric(
            "perf/{rollout,rollout_wait,train,train_wait,eval,eval_wait,save_model,snapshot,update_weights,sleep,wake_up}_time",
            "seconds of a phase",
            "s",
            SUM,
            "",
        ),
        Metric(
            "perf/{slow_rank,critic-slow_rank}",
            "rank that takes 1.5 times what the others take where none waits for another; -1: none",
            "",
            "step",
            "-1",
        ),
        Metric("perf/failed_saves", "saves that failed", "", SUM, "absent"),
        Metric(
            "perf/{create_train,release_train}_time",
            "of the trainer's start and end, with `--release-train`",
            "s",
            SUM,
            "absent",
        ),
        Metric("perf/{restart,rebuild}_time", "of a start in place of what was lost", "s", SUM, "absent"),
        Metric("perf/rebuild_lost_steps", "optimizer steps that lost ranks cost", "", SUM, "absent"),
        Metric(
            "perf/{data_preprocess,log_probs,ref_log_probs,teacher_log_probs,old_log_probs,recorded_log_probs,actor_train}_time",
            "seconds of a part of training",
            "s",
            SUM,
            "",
        ),
        Metric(
            "perf/critic-{data_preprocess,values,steps,train}_time", "the same of the critic", "s", SUM, ""
        ),
        Metric(
            "perf/{log_probs,ref_log_probs,actor_train}_tflops",
            "what the model computes",
            "TFLOP/s",
            "GPU",
            "40 % of the peak",
        ),
        Metric("perf/actor_train_tok_per_s", "trained", "tokens/s", "all GPUs", ""),
        Metric(
            "perf/actor_train_mfu",
            "of the peak in 16 bits, reached in optimizer steps; of known GPUs",
            "part",
            "GPU",
            "above 0.3",
        ),
        Metric(
            "perf/{,critic-}memory_{allocated,reserved}_gib",
            "most since the last row: of tensors, of the allocator; on GPUs",
            "GiB",
            "fullest GPU of the role",
            "below the GPU's",
        ),
        Metric("perf/update_weights_wire_bytes", "sent to engines", "bytes", SUM, ""),
        Metric(
            "perf/update_weights_transfer_time",
            "in which weights were gathered, converted and sent",
            "s",
            SUM,
            "",
        ),
        Metric("perf/update_weights_gb_per_s", "speed of that", "GB/s", "transfer time", ""),
        Metric(
            "perf/update_weights_floor_time",
            "that [the path alone](usage.md#the-speed-of-a-sync) would have taken at least",
            "s",
            SUM,
            "",
        ),
        Metric("perf/update_weights_floor_share", "that over the transfer time", "part", "", "up to 1"),
        Metric(
            "perf/update_weights_density",
            "part of the bytes that has changed, with `--update-weight-mode delta`, or that "
            "[adapters](lora.md#sync) have, with `--no-lora-merge`",
            "",
            SUM,
            "",
        ),
        Metric(
            "perf/update_weights_pause_time", "in which engines stood still for new weights", "s", SUM, ""
        ),
        Metric(
            "perf/update_weights_commit_time",
            "of that, in which the slowest engine took them in; of the embedded engine",
            "s",
            SUM,
            "near the pause",
        ),
        Metric(
            "perf/update_weights_rounding",
            "of what [adapters](lora.md#sync) add, lost where merged weights were rounded; of the worst rank",
            "part",
            SUM,
            "far below 1",
        ),
        Metric(
            "perf/{,effective_}tokens_per_gpu_per_sec",
            "generated; trained ones alone. GPUs that engines have when the rollout begins",
            "tokens/s",
            "GPU",
            "",
        ),
        Metric(
            "perf/longest_{,effective_}sample_tokens_per_sec{,_without_non_generation}",
            "of the longest response, which bounds the rollout",
            "tokens/s",
            "",
            "",
        ),
        Metric("perf/non_generation_time/{mean,median,max,min}", "tools and rewards", "s", SAMPLES, ""),
        Metric(
            "perf/{request,prefill,decode}/<measured>/{mean,median,max,min}",
            "what engines measured; throughput in tokens/s",
            "s",
            "requests",
            "",
        ),
    ),
    "Evaluations": (
        Metric("eval/step", "number of rollouts that were trained", "", "", ""),
        Metric("eval/<dataset>", "reward of a dataset", "reward", SAMPLES, "rises: the figure to report"),
        Metric("eval/<dataset>-truncated_ratio", "answers that were cut off", "part", SAMPLES, "near 0"),
        Metric("eval/<dataset>-pass@<k>", "as passrate/pass@<k>", "part", "groups", "rises"),
        Metric("eval/<dataset>/<rollout metric>", "the metrics of samples that rollouts have", "", "", ""),
        Metric("eval/<dataset>/{prompts_too_long,given_up}", "not evaluated", "samples", COUNT, "absent"),
        Metric("eval/missing", "an evaluation beside training that was lost", "", "", "absent"),
    ),
}
"""By the heading under which the page has them."""


def every_metric() -> Iterator[Metric]:
    """All of them, in the order of the page."""
    for metrics in METRICS.values():
        yield from metrics


def undescribed(names: Iterable[str]) -> set[str]:
    """Names that the table does not have, of the keys of rows in a metrics file."""
    return {
        name
        for name in set(names) - RESERVED_KEYS
        if not any(pattern.fullmatch(name) for pattern in _patterns())
    }


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    return tuple(metric.pattern for metric in every_metric())
