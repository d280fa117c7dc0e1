#!/usr/bin/env bash
# GRPO of Qwen3-Next-80B-A3B-Instruct on mathematics, on 4 nodes of 8 GPUs shared by trainer and engines.
# Needs $MODELS/Qwen3-Next-80B-A3B-Instruct and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen3-next-80B-A3B
grpo_on_mathematics qwen3-next-80B-A3B Qwen3-Next-80B-A3B-Instruct

PERF_ARGS=(
    --actor-num-nodes 4
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 8192
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
