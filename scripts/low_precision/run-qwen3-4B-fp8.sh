#!/usr/bin/env bash
# GRPO of Qwen3-4B on mathematics, on one node of 8 GPUs shared by trainer and engines. The engines serve
# Qwen3-4B-FP8, and get every update of the weights in its format; the trainer starts from the unquantised weights and
# goes on in bfloat16. What quantisation changes in an answer's log-probs is corrected for in the loss (TIS). Needs
# $MODELS/Qwen3-4B-FP8, $MODELS/Qwen3-4B and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"
use_model qwen3-4B
grpo_on_mathematics qwen3-4B-fp8 Qwen3-4B-FP8

PERF_ARGS=(
    --ref-load "$MODELS/Qwen3-4B"
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 2
    --sequence-parallel
    --max-tokens-per-gpu 9216
    --use-tis
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
