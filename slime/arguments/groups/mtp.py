"""Multi-token prediction (MTP) layers."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.config.mtp import MtpConfig
from slime.models import FAMILIES
from slime.models.hf_config import read_hf_config
from slime.models.rules import WeightMap

_PUBLISHED = "num_nextn_predict_layers"


def notes(args: Namespace) -> Iterator[str]:
    """Layers that nothing trains."""
    if args.mtp_num_layers and not args.enable_mtp_training:
        yield (
            f"--mtp-num-layers {args.mtp_num_layers}: has no effect without --enable-mtp-training, MTP "
            "layers are not built"
        )


def contradictions(args: Namespace) -> Iterator[str]:
    """Training layers that are not there, or that something else than our model would have to compute."""
    if not args.enable_mtp_training:
        return
    name = "--enable-mtp-training"
    if not args.mtp_num_layers:
        yield f"{name}: wanted --mtp-num-layers 1, or as many as the checkpoint has"
        return
    if args.custom_model_provider_path:
        yield f"{name}: not with --custom-model-provider-path (the layers are put into the model built here)"
    if args.fp32_residual_connection:
        yield f"{name}: not with --fp32-residual-connection (they read hidden states of the model's dtype)"
    family = FAMILIES.get(args.model_type)
    if family is None:
        return  # the FSDP trainer's, which refuses the flag
    if family.weights.mtp is None:
        there = ", ".join(sorted(other for other, known in FAMILIES.items() if known.weights.mtp))
        yield f"{name}: {args.model_type} has no such layers that are known (wanted: one of {there})"
        return
    if _share_tensors(family.weights, args.mtp_num_layers):
        yield f"--mtp-num-layers {args.mtp_num_layers}: checkpoints of {args.model_type} have one (wanted: 1)"
    yield from _too_many(args)


def _share_tensors(weights: WeightMap, layers: int) -> bool:
    """Whether a checkpoint has the same name for tensors of several such layers."""
    names = weights.mtp.names(layers, ()) if weights.mtp else []
    return len({weights.rule_for(name).hf_names for name in names}) < len(names)


def _too_many(args: Namespace) -> Iterator[str]:
    """More layers than config.json knows."""
    published = read_hf_config(args.hf_checkpoint).get(_PUBLISHED)
    if isinstance(published, int) and published < args.mtp_num_layers:
        yield (
            f"--mtp-num-layers {args.mtp_num_layers}: config.json of --hf-checkpoint says "
            f"{_PUBLISHED} {published}"
        )


CONFIG_GROUP = ConfigGroup(
    {"multi-token prediction (MTP)": MtpConfig}, notes=notes, contradictions=contradictions
)
