"""The two engine servers. Both speak SGLang's HTTP protocol: they differ in how one is started.

    engine = ENGINES[args.rollout_engine](args, placement, log_dir)

Nothing else asks which of them runs.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from slime.arguments.core.flag import add_flags, flags_of
from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.sglang_utils.server_engine import ServerEngine

_HEALTH = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
"""A router that asks /health must not lose an engine to a pause."""
SGLANG_ENVIRONMENT = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    **_HEALTH,
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
}
"""Defaults that suit training; a variable set in the environment wins."""


class SGLangEngine(ServerEngine):
    """Serves on GPUs with SGLang as it is released, 0.5.17 to 0.5.23."""

    module = "slime.backends.sglang_utils.launch_server"

    def parser(self) -> argparse.ArgumentParser:
        """The options of the SGLang that is installed.

        Asked of its parser, not of its class: ``ServerArgs`` is a dataclass in some releases and a
        msgspec struct in others. Importing it takes seconds.
        """
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser(self.module)
        ServerArgs.add_cli_args(parser)
        return parser

    def settings(self) -> dict[str, Any]:
        placement = self.placement
        return {
            **super().settings(),
            "nccl_port": placement.nccl_port,
            "dist_init_addr": placement.dist_init_addr,
            "nnodes": placement.num_nodes,
            "node_rank": placement.node_rank,
            "base_gpu_id": placement.base_gpu_id,
            "gpu_id_step": 1,
            "skip_server_warmup": True,
            "enable_draft_weights_cpu_backup": True,
            **self._disaggregation(),
        }

    def _disaggregation(self) -> dict[str, Any]:
        """Yields the options of an engine that does one half of the work.

        Those that a release has not are left out.
        """
        kind = self.placement.worker_type
        if kind == "prefill":
            return {
                "disaggregation_mode": "prefill",
                "disaggregation_bootstrap_port": self.placement.bootstrap_port,
                "load_balance_method": "follow_bootstrap_room",
            }
        if kind == "decode":
            return {
                "disaggregation_mode": "decode",
                "prefill_round_robin_balance": True,
                "enable_hierarchical_cache": False,
            }
        return {}

    def preferences(self) -> dict[str, Any]:
        values = {**super().preferences(), "enable_metrics": True}
        if self.serves_trained_model:
            # By itself it takes float16 for a checkpoint that is stored in float32.
            values.setdefault("dtype", "bfloat16")
        if self.frees_memory:
            # Captured prefill graphs hold memory that the memory saver then cannot release.
            values["cuda_graph_backend_prefill"] = "disabled"
        return values

    def environment(self) -> Mapping[str, str | None]:
        """SGLang's memory saver does not work with expandable segments, hence the removed variables."""
        defaults = {name: os.environ.get(name, value) for name, value in SGLANG_ENVIRONMENT.items()}
        return {**defaults, "PYTORCH_CUDA_ALLOC_CONF": None, "PYTORCH_ALLOC_CONF": None}


class EmbeddedEngine(ServerEngine):
    """Serves on one GPU or a CPU with ``python -m slime.backends.embedded_engine``."""

    module = "slime.backends.embedded_engine"
    can_be_forked = True
    pulls_weights = True

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(self.module)
        add_flags(parser, flags_of(EmbeddedServerArgs))
        return parser

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "base_gpu_id": self.placement.base_gpu_id}

    def preferences(self) -> dict[str, Any]:
        asked = self.config.tracking.prometheus_port is not None
        return {**super().preferences(), **({"enable_metrics": True} if asked else {})}

    def environment(self) -> Mapping[str, str | None]:
        """One thread, not spinning: measured 10 to 20 times faster than OpenMP's default on shared cores."""
        defaults = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **_HEALTH,
        }
        return {name: os.environ.get(name, value) for name, value in defaults.items()}


ENGINES: dict[str, type[ServerEngine]] = {"sglang": SGLangEngine, "embedded": EmbeddedEngine}
"""Servers by the value of ``--rollout-engine``."""
