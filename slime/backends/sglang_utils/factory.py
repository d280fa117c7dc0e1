"""Which engine runs, and with which address and key: the one place that chooses."""

import importlib.util
import secrets
from argparse import Namespace
from pathlib import Path

from slime.backends.rollout_engine import RolloutEngine
from slime.backends.sglang_utils.embedded import EmbeddedEngine
from slime.backends.sglang_utils.server_engine import EnginePlacement
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.accelerator import has_gpu
from slime.utils.http_utils import is_loopback

LOOPBACK = "127.0.0.1"


def resolve_engine_kind(choice: str) -> str:
    """``--rollout-engine`` with "auto" resolved: "sglang" where there is a GPU, else "embedded".

    Raises:
        ValueError: SGLang is needed but not installed, or the choice is unknown.
    """
    if choice not in ("auto", "sglang", "embedded"):
        raise ValueError(f"--rollout-engine {choice}: unknown (wanted: auto, sglang or embedded)")
    kind = ("sglang" if has_gpu() else "embedded") if choice == "auto" else choice
    if kind == "sglang" and importlib.util.find_spec("sglang") is None:
        raise ValueError(
            f"--rollout-engine {choice}: SGLang is not installed "
            "(wanted: pip install 'slime[sglang]', or --rollout-engine embedded)"
        )
    return kind


def engine_host(node_ips: set[str], node_ip: str) -> str:
    """Where an engine on ``node_ip`` binds: on loopback if the cluster's nodes are one machine."""
    return LOOPBACK if len(node_ips) <= 1 else node_ip


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
    """The engine that ``args.rollout_engine`` asks for, not launched; see :class:`EnginePlacement`."""
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
    engine_class = SGLangEngine if resolve_engine_kind(args.rollout_engine) == "sglang" else EmbeddedEngine
    return engine_class(args, placement, log_dir)
