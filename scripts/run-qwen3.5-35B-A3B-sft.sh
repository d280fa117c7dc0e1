#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3.5-35B-A3B on conversations, on one node of 8 GPUs. No engine is started.
# Needs $MODELS/Qwen3.5-35B-A3B and $DATASETS/openhermes2_5.parquet with chats in its field "messages".
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen3.5-35B-A3B
LOSS_MASK_TYPE=qwen3_5
sft_on_conversations qwen3.5-35B-A3B-sft Qwen3.5-35B-A3B

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --tensor-model-parallel-size 2
    --sequence-parallel
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 9216
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "$@"
