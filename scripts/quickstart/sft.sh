#!/usr/bin/env bash
# The quickstart's first phase: imitate 6,000 solved problems. Called by tools/quickstart with
# OUTPUT (directory), SEED and NUM_ROLLOUT set.
set -euo pipefail

CKPT_ARGS=(
    --hf-checkpoint "$OUTPUT/model-initial"
    --save "$OUTPUT/sft"
    --save-hf "$OUTPUT/model-sft"
    --save-interval "$NUM_ROLLOUT"
    --no-save-optim
)

# A "rollout" of SFT only reads data: 640 conversations, cut into 10 optimizer steps.
ROLLOUT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "$OUTPUT/data/sft.jsonl"
    --input-key messages
    --rollout-shuffle
    --rollout-seed "$SEED"
    --num-rollout "$NUM_ROLLOUT"
    --rollout-batch-size 640
    --global-batch-size 64
)

SFT_ARGS=(
    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
)

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048
    --fp32
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 4e-3
    --lr-decay-style cosine
    --lr-warmup-iters 20
    --min-lr 8e-5
    --weight-decay 0.0
    --adam-beta1 0.9
    --adam-beta2 0.98
)

MISC_ARGS=(
    --train-backend "${TRAIN_BACKEND:-megatron}"
    --seed "$SEED"
    --metrics-file "$OUTPUT/sft/metrics.jsonl"
)

exec python train.py \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${SFT_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${MISC_ARGS[@]}"
