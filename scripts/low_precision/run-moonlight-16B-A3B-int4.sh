#!/usr/bin/env bash
# GRPO of Moonlight-16B-A3B-Instruct on mathematics, on one node of 8 GPUs shared by trainer and engines. The engines
# serve experts of 4-bit integers, in which they get every update of the weights; the trainer starts from the
# unquantised weights and goes on in bfloat16. What quantisation changes in an answer's log-probs is corrected for in
# the loss (TIS). Needs $MODELS/Moonlight-16B-A3B-Instruct-INT4 (tools/convert_hf_to_int4.py makes it),
# $MODELS/Moonlight-16B-A3B-Instruct and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"
use_model moonlight
RESPONSE_LEN=4096 EVAL_RESPONSE_LEN=4096 # of 8192 tokens that the model knows
grpo_on_mathematics moonlight-16B-A3B-int4 Moonlight-16B-A3B-Instruct-INT4

# The checkpoint's tokenizer is Python code (tokenization_moonshot.py), which transformers has not: look at it. It imports
# tiktoken, which SGLang brings along.
TOKENIZER_ARGS=(--trust-remote-code)

PERF_ARGS=(
    --ref-load "$MODELS/Moonlight-16B-A3B-Instruct"
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 20480
    --use-tis
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${TOKENIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" "$@"
