#!/usr/bin/env bash
# GRPO of Llama-3.2-3B-Instruct on mathematics, on one node of 8 AMD GPUs shared by trainer and engines. It has not
# been run on AMD GPUs yet. Needs PyTorch and SGLang for ROCm, $MODELS/Llama-3.2-3B-Instruct and the mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model llama3.2-3B-Instruct-amd
EVAL_RESPONSE_LEN=8192
grpo_on_mathematics llama3.2-3B-Instruct-amd Llama-3.2-3B-Instruct

# The kernel argument pool in device memory, and scratch memory that is kept, are what ROCm's guides advise.
export HIP_FORCE_DEV_KERNARG=1 HSA_NO_SCRATCH_RECLAIM=1

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 1
    --no-gradient-accumulation-fusion
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.4
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
