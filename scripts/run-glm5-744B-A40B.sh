#!/usr/bin/env bash
# GRPO of GLM-5 on mathematics, on 32 nodes of 8 GPUs shared by trainer and engines.
# Needs $MODELS/GLM-5 and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model glm5-744B-A40B
grpo_on_mathematics glm5-744B-A40B GLM-5

PERF_ARGS=(
    --actor-num-nodes 32
    --actor-num-gpus-per-node 8
    --colocate
    --freeze-indexer
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --decoder-last-pipeline-num-layers 18
    --context-parallel-size 2
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 64
    --sglang-mem-fraction-static 0.7
    --sglang-enable-dp-attention
    --sglang-dp-size 64
    --sglang-ep-size 64
    --sglang-enable-dp-lm-head
    --sglang-moe-dense-tp-size 1
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
