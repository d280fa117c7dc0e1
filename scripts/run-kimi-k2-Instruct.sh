#!/usr/bin/env bash
# GRPO of Kimi-K2-Instruct on mathematics, on 32 nodes of 8 GPUs shared by trainer and engines.
# The engines serve the published checkpoint, float8 blocks, and get every update of the weights in its format; the
# trainer goes on from its dequantised weights. Needs $MODELS/Kimi-K2-Instruct and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model kimi-k2
grpo_on_mathematics kimi-k2-Instruct Kimi-K2-Instruct

# The checkpoint's tokenizer is Python code (tokenization_kimi.py), which transformers has not: look at it. It imports
# tiktoken, which SGLang brings along.
TOKENIZER_ARGS=(--trust-remote-code)

PERF_ARGS=(
    --actor-num-nodes 32
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --decoder-last-pipeline-num-layers 5
    --context-parallel-size 4
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 16384
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 64
    --sglang-mem-fraction-static 0.7
    --sglang-enable-dp-attention
    --sglang-dp-size 8
    --sglang-ep-size 64
    --sglang-enable-dp-lm-head
    --sglang-moe-dense-tp-size 1
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${TOKENIZER_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" "$@"
