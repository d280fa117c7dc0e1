"""Checkpoints that SGLang serves otherwise than their config.json says."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator

from slime.models.experts import sparse_layers
from slime.models.hf_config import HfConfig, HfConfigError

_ALL_SPARSE = ("qwen2_moe", "qwen3_moe", "qwen3_next")


def bad_experts(args: Namespace) -> Iterator[str]:
    """Dense layers among those with experts, in families of which SGLang 0.5.23 gives experts to every layer.

    It says nothing of the weights that it then lacks: such an engine answers with random ones.
    """
    if args.rollout_engine != "sglang":
        return
    for path in _served(args):
        with contextlib.suppress(HfConfigError):  # another look says so
            config = HfConfig.read(path)
            if config.get("model_type") not in _ALL_SPARSE:
                continue
            dense = [i for i, sparse in enumerate(_sparse(config)) if not sparse]
            if dense:
                yield (
                    f"{path}: layer {dense[0]} is dense (mlp_only_layers {config.get('mlp_only_layers')}, "
                    f"decoder_sparse_step {config.get('decoder_sparse_step')}), and SGLang gives experts to "
                    "every layer of such a model (wanted: --rollout-engine embedded)"
                )


def _sparse(config: HfConfig) -> tuple[int, ...]:
    return sparse_layers(config, config.size("num_hidden_layers"))


def _served(args: Namespace) -> list[str]:
    if args.rollout_external:
        return [args.hf_checkpoint]
    return list(dict.fromkeys(model.model_path or args.hf_checkpoint for model in args.served_models))
