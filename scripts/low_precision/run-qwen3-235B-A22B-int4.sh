#!/usr/bin/env bash
# GRPO of Qwen3-235B-A22B on mathematics, on 8 nodes of 8 GPUs shared by trainer and engines. The engines serve
# experts of 4-bit integers, in which they get every update of the weights; the trainer starts from the unquantised
# weights and goes on in bfloat16. What quantisation changes in an answer's log-probs is corrected for in the loss
# (TIS). Needs $MODELS/Qwen3-235B-A22B-INT4 (tools/convert_hf_to_int4.py makes it), $MODELS/Qwen3-235B-A22B and the
# mathematics of scripts/README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../lib/launch.sh"
use_model qwen3-235B-A22B
grpo_on_mathematics qwen3-235B-A22B-int4 Qwen3-235B-A22B-INT4

PERF_ARGS=(
    --ref-load "$MODELS/Qwen3-235B-A22B"
    --actor-num-nodes 8
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --decoder-last-pipeline-num-layers 22
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
    --max-tokens-per-gpu 16384
    --use-tis
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${OFFLOAD_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
