#!/usr/bin/env bash
# GRPO of gemma-3-1b-it on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/gemma-3-1b-it and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model gemma3-1B
RESPONSE_LEN=4096 EVAL_RESPONSE_LEN=8192
grpo_on_mathematics gemma3-1B gemma-3-1b-it

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 1
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.6
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
