#!/usr/bin/env bash
# GRPO of Qwen3.5-27B on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/Qwen3.5-27B and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen3.5-27B
grpo_on_mathematics qwen3.5-27B Qwen3.5-27B

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 4
    --sequence-parallel
    --max-tokens-per-gpu 8192
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
