"""Corrections for data of another policy than the one that is trained."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime.arguments.concern import Concern
from slime.arguments.flags import flag, path_flag, refused


@dataclass(frozen=True)
class OffPolicyArgs:
    """Corrections for the gap between trainer and engine, and between old and new policy."""

    use_rollout_entropy: bool = flag(False, help="compute the entropy in the log-prob pass")
    get_mismatch_metrics: bool = flag(False, help="log the gap between trainer and engine")
    use_rollout_logprobs: bool = flag(False, help="the engine's log-probs are the old policy's")
    use_tis: bool = flag(False, help="truncated importance sampling between engine and trainer")
    tis_clip: float = flag(2.0, above=0, help="upper bound of the importance weight")
    tis_clip_low: float = flag(0.0, at_least=0, help="lower bound of the importance weight")
    custom_tis_function_path: str | None = path_flag("replaces truncated importance sampling")
    use_opsm: bool = flag(False, help="mask sequences that drifted and have a negative advantage")
    opsm_delta: float = flag(1e-4, at_least=0, help="sequence KL above which --use-opsm masks")
    reset_optimizer_states: bool = flag(False, help="zero Adam's moments before each rollout's steps")
    use_routing_replay: bool = refused(False, help="replay the trainer's MoE routing")
    use_rollout_routing_replay: bool = refused(False, help="replay the engine's MoE routing")
    use_opd: bool = refused(False, help="on-policy distillation")
    opd_type: Literal["sglang", "megatron"] | None = refused(
        help="who runs the teacher", idle_without="--use-opd"
    )
    opd_kl_coef: float = refused(1.0, help="weight of the KL to the teacher", idle_without="--use-opd")
    opd_teacher_load: str | None = refused(help="checkpoint of the teacher")
    opd_teacher_ckpt_step: int | None = refused(help="iteration of the teacher's checkpoint")


def contradictions(args: Namespace) -> Iterator[str]:
    """Corrections that exclude each other, or that nothing would use."""
    if args.use_rollout_logprobs and args.use_tis:
        yield "--use-rollout-logprobs and --use-tis: only one of them at a time"
    if args.get_mismatch_metrics and not args.custom_tis_function_path and not args.use_tis:
        yield "--get-mismatch-metrics: needs --use-tis or --custom-tis-function-path"
    if args.custom_tis_function_path and not (args.use_tis or args.get_mismatch_metrics):
        yield "--custom-tis-function-path: needs --use-tis or --get-mismatch-metrics"
    no_pass = args.use_rollout_logprobs and not args.get_mismatch_metrics
    if args.loss_type == "policy_loss" and args.use_rollout_entropy and no_pass:
        yield "--use-rollout-entropy: --use-rollout-logprobs leaves out the pass that would compute it"


CONCERN = Concern({"off-policy corrections": OffPolicyArgs}, contradictions=contradictions)
