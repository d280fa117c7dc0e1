#!/usr/bin/env bash
# Rejection sampling: Qwen3-4B answers mathematics, and its right answers become conversations to imitate, on one
# node of 8 GPUs. Needs $MODELS/Qwen3-4B and $DATASETS/dapo-math-17k/dapo-math-17k.jsonl; writes to
# $RUNS/rejection-sampling. Started again it goes on where it ended.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen3-4B

CKPT_ARGS=(
    --hf-checkpoint "$MODELS/Qwen3-4B"
)

ROLLOUT_ARGS=(
    --debug-rollout-only
    --rollout-function-path slime.rollout.rejection_sampling.generate_rollout
    --prompt-data "$DATASETS/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --rm-type math
    --num-epoch 1
    --rollout-batch-size 128
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1.0
)

REJECTION_ARGS=(
    --rejection-output "$RUNS/rejection-sampling"
    --rejection-min-reward 1.0
    --rejection-max-per-prompt 2
)

PERF_ARGS=(
    --rollout-num-gpus 8
    --rollout-num-gpus-per-engine 1
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${REJECTION_ARGS[@]}" "${PERF_ARGS[@]}" "$@"
