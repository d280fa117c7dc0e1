#!/usr/bin/env bash
# GRPO of DeepSeek-V2-Lite-Chat on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/DeepSeek-V2-Lite-Chat and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model deepseek-v2-lite
grpo_on_mathematics deepseek-v2-lite DeepSeek-V2-Lite-Chat

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 20480
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
