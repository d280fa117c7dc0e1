#!/usr/bin/env bash
# GRPO of GLM-Z1-9B-0414 on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/GLM-Z1-9B-0414 and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model glm4-9B
grpo_on_mathematics glm4-9B GLM-Z1-9B-0414

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 2
    --sequence-parallel
    --context-parallel-size 2
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.6
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
