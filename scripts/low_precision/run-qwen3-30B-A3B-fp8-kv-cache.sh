#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B on mathematics, on one node of 8 GPUs shared by trainer and engines. The engines keep keys and
# values of the attention in FP8, so that twice as many answers fit; what that changes in an answer's log-probs is
# corrected for in the loss (TIS). Needs $MODELS/Qwen3-30B-A3B and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"
use_model qwen3-30B-A3B
grpo_on_mathematics qwen3-30B-A3B-fp8-kv-cache Qwen3-30B-A3B

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 9216
    --use-tis
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
    --sglang-kv-cache-dtype fp8_e4m3
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" "$@"
