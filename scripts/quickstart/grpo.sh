#!/usr/bin/env bash
# The quickstart's second phase: practise with a calculator, rewarded for right answers. Called by
# tools/quickstart with OUTPUT (directory), SEED and NUM_ROLLOUT set. Flags that are given, as those of another
# algorithm, come after its own.
set -euo pipefail

CKPT_ARGS=(
    --hf-checkpoint "$OUTPUT/model-sft"
    --save "$OUTPUT/rl"
    --save-hf "$OUTPUT/model-rl"
    --save-interval "$NUM_ROLLOUT"
)

# 32 problems x 8 attempts. The calculator and the reward are plug-ins, found by their dotted paths.
ROLLOUT_ARGS=(
    --prompt-data "$OUTPUT/data/rl.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rollout-seed "$SEED"
    --custom-generate-function-path examples.calculator_tool.generate.generate
    --custom-rm-path examples.calculator_tool.reward.reward
    --num-rollout "$NUM_ROLLOUT"
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --global-batch-size 256
    --rollout-max-response-len 24
    --rollout-temperature 1.0
    --save-debug-rollout-data "$OUTPUT/recordings/{rollout_id}.pt"
)

# Held-out problems, answered once by sampling and once greedily; first before any RL.
EVAL_ARGS=(
    --eval-config "$OUTPUT/eval.yaml"
    --eval-interval 5
)

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 1
    --colocate
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
    --fp32
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 4e-4
    --lr-decay-style constant
    --weight-decay 0.0
    --adam-beta1 0.9
    --adam-beta2 0.98
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-server-concurrency 256
)

MISC_ARGS=(
    --train-backend "${TRAIN_BACKEND:-megatron}"
    --seed "$SEED"
    --metrics-file "$OUTPUT/metrics.jsonl"
)

exec python train.py \
    "${CKPT_ARGS[@]}" \
    "${ROLLOUT_ARGS[@]}" \
    "${EVAL_ARGS[@]}" \
    "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" \
    "${SGLANG_ARGS[@]}" \
    "${MISC_ARGS[@]}" \
    "$@"
