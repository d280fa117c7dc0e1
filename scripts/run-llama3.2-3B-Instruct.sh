#!/usr/bin/env bash
# GRPO of Llama-3.2-3B-Instruct on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/Llama-3.2-3B-Instruct and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model llama3.2-3B-Instruct
EVAL_RESPONSE_LEN=8192
grpo_on_mathematics llama3.2-3B-Instruct Llama-3.2-3B-Instruct

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 1
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
