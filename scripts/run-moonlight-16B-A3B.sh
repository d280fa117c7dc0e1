#!/usr/bin/env bash
# GRPO of Moonlight-16B-A3B-Instruct on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/Moonlight-16B-A3B-Instruct and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model moonlight
RESPONSE_LEN=4096 EVAL_RESPONSE_LEN=4096 # of 8192 tokens that the model knows
grpo_on_mathematics moonlight-16B-A3B Moonlight-16B-A3B-Instruct

# The checkpoint's tokenizer is Python code (tokenization_moonshot.py), which transformers has not: look at it. It imports
# tiktoken, which SGLang brings along.
TOKENIZER_ARGS=(--trust-remote-code)

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

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${TOKENIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" "$@"
