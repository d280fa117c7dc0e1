#!/usr/bin/env bash
# One rollout of Qwen2.5-0.5B-Instruct on GSM8K on a single GPU, whose memory may be the machine's own (GB10): does
# everything start? Needs $MODELS/Qwen2.5-0.5B-Instruct and $DATASETS/gsm8k/train.parquet. Nothing is saved.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen2.5-0.5B

SMOKE_ARGS=(
    --hf-checkpoint "$MODELS/Qwen2.5-0.5B-Instruct"
    --prompt-data "$DATASETS/gsm8k/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rm-type math
    --num-rollout 1
    --rollout-batch-size 4
    --n-samples-per-prompt 2
    --rollout-max-response-len 256
    --global-batch-size 8
    --advantage-estimator grpo
    --lr 1e-6
    --lr-decay-style constant
    --adam-beta1 0.9
    --adam-beta2 0.98
)

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 1
    --num-gpus-per-node 1
    --colocate
    --max-tokens-per-gpu 4096
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.4
)

launch "${MODEL_ARGS[@]}" "${SMOKE_ARGS[@]}" "${TRAINING_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
