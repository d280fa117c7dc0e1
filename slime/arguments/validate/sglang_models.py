"""Checkpoints that SGLang serves otherwise than their config.json says."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator

from slime.models import FAMILIES
from slime.models.experts import sparse_layers
from slime.models.family import InSglang
from slime.models.hf_config import HfConfig, HfConfigError

_UNKNOWN = InSglang()


def unlike_sglang(args: Namespace) -> Iterator[str]:
    """What SGLang says nothing of, and answers with random weights."""
    if args.rollout_engine == "sglang":
        yield from bad_experts(args)
        yield from bad_heads(args)


def bad_experts(args: Namespace) -> Iterator[str]:
    """Dense layers among those with experts, in families where SGLang 0.5.23 gives experts to every layer."""
    for path, config in _served(args):
        if not _in_sglang(config).all_sparse:
            continue
        dense = [i for i, sparse in enumerate(_sparse(config)) if not sparse]
        if dense:
            yield (
                f"{path}: layer {dense[0]} is dense (mlp_only_layers {config.get('mlp_only_layers')}, "
                f"decoder_sparse_step {config.get('decoder_sparse_step')}), and SGLang gives experts to "
                "every layer of such a model (wanted: --rollout-engine embedded)"
            )


def bad_heads(args: Namespace) -> Iterator[str]:
    """Output layers that are the embedding's, in families that have one of their own in SGLang.

    The checkpoint has no weights for it, and no weight update brings any.
    """
    for path, config in _served(args):
        kind = config.get("model_type")
        if _in_sglang(config).own_head and config.get("tie_word_embeddings") is True:
            yield (
                f"{path}: tie_word_embeddings is true, and SGLang gives a {kind} an output layer of its own, "
                "which nobody fills (wanted: --rollout-engine embedded, or a checkpoint with lm_head.weight "
                "and tie_word_embeddings false)"
            )


def _in_sglang(config: HfConfig) -> InSglang:
    family = FAMILIES.get(config.get("model_type"))
    return family.in_sglang if family else _UNKNOWN


def _sparse(config: HfConfig) -> tuple[int, ...]:
    return sparse_layers(config, config.size("num_hidden_layers"))


def _served(args: Namespace) -> Iterator[tuple[str, HfConfig]]:
    """The checkpoints that engines serve, with what their config.json says."""
    paths = [model.model_path or args.hf_checkpoint for model in args.served_models]
    if args.rollout_external:
        paths = [args.hf_checkpoint]
    for path in dict.fromkeys(paths):
        with contextlib.suppress(HfConfigError):  # another look says so
            yield path, HfConfig.read(path)
