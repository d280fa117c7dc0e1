"""The KL to a reference model."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.arguments.validate.checkpoint_files import bad_checkpoint, is_conversion, unusable_weights
from slime.config.kl import KlConfig

LOSS_ESTIMATORS = frozenset(
    {("k2", False), ("k3", False), ("low_var_kl", False), ("k1", True), ("k3", True), ("low_var_kl", True)}
)
"""``--kl-loss-type`` and ``--use-unbiased-kl`` that, in the loss, have the gradient of a KL."""
REWARD_ESTIMATORS = frozenset({"k1"})
"""``--kl-loss-type`` that, in the reward, has the gradient of a KL. Why: docs/algorithms/index.md."""


def notes(args: Namespace) -> Iterator[str]:
    """A reference whose weights are read from where they were converted from, and estimators that mislead."""
    if _is_conversion(args):
        yield (
            f"--ref-load {args.ref_load}: says that a converter wrote it, and holds no weights; "
            "those of --hf-checkpoint are used, after which it is named"
        )
    if args.loss_type == "policy_loss":
        yield from _wrong_gradients(args)


def derive(args: Namespace) -> None:
    """A conversion of --hf-checkpoint holds the weights that are the default."""
    if _is_conversion(args):
        args.ref_load = None


def _is_conversion(args: Namespace) -> bool:
    if args.ref_load is None or args.ref_ckpt_step is not None:
        return False
    return is_conversion(args.ref_load, args.hf_checkpoint)


def contradictions(args: Namespace) -> Iterator[str]:
    """The KL in two places, or in none."""
    if args.kl_coef and args.kl_loss_coef:
        yield f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef}: only one of them above 0"
    if args.ref_update_interval is not None and not (args.kl_coef or args.use_kl_loss):
        yield "--ref-update-interval: there is no reference model (wanted: --use-kl-loss or --kl-coef)"
    if args.kl_loss_coef and not args.use_kl_loss:
        yield f"--kl-loss-coef {args.kl_loss_coef}: needs --use-kl-loss"
    if args.use_unbiased_kl and not args.use_kl_loss:
        yield "--use-unbiased-kl: needs --use-kl-loss"


def _wrong_gradients(args: Namespace) -> Iterator[str]:
    """Estimators whose gradient is not that of a KL; with a coefficient of 0 they only measure."""
    kind, unbiased = args.kl_loss_type, args.use_unbiased_kl
    if args.kl_loss_coef and (kind, unbiased) not in LOSS_ESTIMATORS:
        why = "has the wrong gradient" if unbiased else "has an expected gradient of 0 as a loss"
        yield (
            f"--kl-loss-type {kind}{' with --use-unbiased-kl' if unbiased else ''}: {why} "
            f"(wanted: {_choices(unbiased)}, or {_choices(not unbiased)} {'without' if unbiased else 'with'} "
            "--use-unbiased-kl)"
        )
    own_advantages = args.custom_advantage_function_path or args.disable_compute_advantages_and_returns
    if args.kl_coef and kind not in REWARD_ESTIMATORS and not own_advantages:
        wanted = ", ".join(sorted(REWARD_ESTIMATORS))
        yield f"--kl-loss-type {kind} with --kl-coef: has the wrong gradient in the reward (wanted: {wanted})"


def _choices(unbiased: bool) -> str:
    return ", ".join(sorted(kind for kind, other in LOSS_ESTIMATORS if other == unbiased))


def missing(args: Namespace) -> Iterator[str]:
    """The reference model's checkpoint."""
    return bad_checkpoint(args, "ref_load", args.ref_ckpt_step)


def unusable(args: Namespace) -> Iterator[str]:
    """Weights of the reference model that cannot be read."""
    return unusable_weights(args, "ref_load")


CONFIG_GROUP = ConfigGroup(
    {"reference model": KlConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
    missing=missing,
    unusable=unusable,
)
