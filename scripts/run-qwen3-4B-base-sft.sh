#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-4B-Base on conversations, on one node of 8 GPUs. No engine is started.
# Needs $MODELS/Qwen3-4B-Base and $DATASETS/openhermes2_5.parquet with chats in its field "messages".
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen3-4B

CKPT_ARGS=(
    --hf-checkpoint "$MODELS/Qwen3-4B-Base"
    --load "$RUNS/qwen3-4B-base-sft"
    --save "$RUNS/qwen3-4B-base-sft"
    --save-interval 1000
)

# A "rollout" of SFT only reads data.
ROLLOUT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "$DATASETS/openhermes2_5.parquet"
    --input-key messages
    --rollout-shuffle
    --num-epoch 3
    --rollout-batch-size 128
    --global-batch-size 128
)

SFT_ARGS=(
    --loss-type sft_loss
    --loss-mask-type qwen3
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
)

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --tensor-model-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-5
    --lr-decay-style cosine
    --min-lr 1e-6
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
)

WANDB_ARGS=(
    # --use-wandb --wandb-project slime --wandb-group qwen3-4B-base-sft
)

MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${SFT_ARGS[@]}" "${PERF_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${WANDB_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
