#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-235B-A22B on conversations, on 8 nodes of 8 GPUs. No engine is started.
# Needs $MODELS/Qwen3-235B-A22B and $DATASETS/openhermes2_5.parquet with chats in its field "messages".
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen3-235B-A22B
sft_on_conversations qwen3-235B-A22B-sft Qwen3-235B-A22B

PERF_ARGS=(
    --actor-num-nodes 8
    --actor-num-gpus-per-node 8
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 9216
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "$@"
