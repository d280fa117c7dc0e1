"""Makes the engine that was chosen, and settles its key."""

import secrets
from argparse import Namespace
from pathlib import Path

from slime.backends.rollout_engine import RolloutEngine
from slime.backends.sglang_utils.embedded import EmbeddedEngine
from slime.backends.sglang_utils.server_engine import EnginePlacement
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.http_utils import is_loopback


def engine_api_key(args: Namespace, host: str) -> str | None:
    """The key of all engines of a run: ``--sglang-api-key``, else a new token if they leave loopback.

    To be called once per run; engines, router and clients share the result.
    """
    configured = getattr(args, "sglang_api_key", None)
    if configured or is_loopback(host):
        return configured
    return secrets.token_urlsafe(32)


def create_engine(
    args: Namespace,
    *,
    rank: int,
    host: str,
    port: int,
    num_gpus: int,
    log_dir: str | Path,
    base_gpu_id: int = 0,
    gpu_offset: int | None = None,
    num_nodes: int = 1,
    node_rank: int = 0,
    nccl_port: int | None = None,
    dist_init_addr: str | None = None,
    api_key: str | None = None,
) -> RolloutEngine:
    """The engine that ``args.rollout_engine`` names (sglang or embedded), not launched.

    See :class:`EnginePlacement` for the arguments.
    """
    placement = EnginePlacement(
        rank=rank,
        host=host,
        port=port,
        num_gpus=num_gpus,
        gpu_offset=gpu_offset,
        base_gpu_id=base_gpu_id,
        num_nodes=num_nodes,
        node_rank=node_rank,
        nccl_port=nccl_port,
        dist_init_addr=dist_init_addr,
        api_key=api_key,
    )
    engine_class = SGLangEngine if args.rollout_engine == "sglang" else EmbeddedEngine
    return engine_class(args, placement, log_dir)
