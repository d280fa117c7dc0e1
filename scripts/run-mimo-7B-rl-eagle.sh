#!/usr/bin/env bash
# GRPO of MiMo-7B-RL on mathematics, on one node of 8 GPUs shared by trainer and engines.
# Needs $MODELS/MiMo-7B-RL and the mathematics of scripts/README.md.
# The engines draft with the checkpoint's MTP layer, which is trained beside the policy.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model mimo-7B-rl
grpo_on_mathematics mimo-7B-rl-eagle MiMo-7B-RL

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 2
    --sequence-parallel
    --max-tokens-per-gpu 9216
)

MTP_ARGS=(
    --enable-mtp-training
    --mtp-loss-scaling-factor 0.2
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --trust-remote-code # SGLang reads config.json by configuration_mimo.py of the checkpoint
    --sglang-mem-fraction-static 0.6
    --sglang-speculative-algorithm EAGLE
    --sglang-speculative-num-steps 3
    --sglang-speculative-eagle-topk 1
    --sglang-speculative-num-draft-tokens 4
)

launch "${MODEL_ARGS[@]}" "${RECIPE_ARGS[@]}" "${PERF_ARGS[@]}" "${MTP_ARGS[@]}" "${SGLANG_ARGS[@]}" "$@"
