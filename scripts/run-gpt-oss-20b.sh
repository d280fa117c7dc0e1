#!/usr/bin/env bash
# GRPO of gpt-oss-20b-BF16 on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/gpt-oss-20b-BF16, which tools/fp8_cast_bf16.py makes of the published gpt-oss-20b, and the
# mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model gpt-oss-20b
grpo_on_mathematics gpt-oss-20b gpt-oss-20b-BF16

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 8
    --max-tokens-per-gpu 8192
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 4
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
