#!/usr/bin/env bash
# GRPO of Qwen1.5-MoE-A2.7B-Chat on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/Qwen1.5-MoE-A2.7B-Chat and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen1.5-MoE-A2.7B
RESPONSE_LEN=4096 EVAL_RESPONSE_LEN=4096 # of 8192 tokens that the model knows
grpo_on_mathematics qwen1.5-MoE-A2.7B Qwen1.5-MoE-A2.7B-Chat

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 2
    --sequence-parallel
    --expert-model-parallel-size 4
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 8192
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 4
    --sglang-mem-fraction-static 0.6
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
