#!/usr/bin/env bash
# GRPO of GLM-4.7 on mathematics, on 8 nodes of 8 GPUs shared by trainer and engines.
# Needs $MODELS/GLM-4.7 and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model glm4.5-355B-A32B
grpo_on_mathematics glm4.7-355B-A32B GLM-4.7

PERF_ARGS=(
    --actor-num-nodes 8
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 32
    --sglang-mem-fraction-static 0.7
    --sglang-enable-dp-attention
    --sglang-dp-size 4
    --sglang-ep-size 32
    --sglang-enable-dp-lm-head
    --sglang-moe-dense-tp-size 1
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
