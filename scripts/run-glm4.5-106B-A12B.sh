#!/usr/bin/env bash
# GRPO of GLM-4.5-Air on mathematics, on 4 nodes of 8 GPUs shared by trainer and engines.
# Needs $MODELS/GLM-4.5-Air and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model glm4.5-106B-A12B
grpo_on_mathematics glm4.5-106B-A12B GLM-4.5-Air

PERF_ARGS=(
    --actor-num-nodes 4
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 4
    --sequence-parallel
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
