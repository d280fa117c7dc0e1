#!/usr/bin/env bash
# GRPO of two models that play a game. MODEL=DIR trains two copies of a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
# Of each policy; four GPUs in all.
example two_policies --rollout-num-gpus 1

if [[ -z "${QUESTIONS:-}" ]]; then
    QUESTIONS="$OUTPUT/tasks.jsonl"
    python "$REPOSITORY/examples/two_policies/make_data.py" --output "$QUESTIONS"
fi

launch "${SIZE_ARGS[@]}" \
    --num-gpus-per-node 4 \
    --actor-num-gpus-per-node 1 \
    --policies "$REPOSITORY/examples/two_policies/policies.yaml" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --rollout-shuffle \
    --custom-generate-function-path examples.two_policies.game.play \
    --rollout-max-response-len 8 \
    --num-steps-per-rollout 2 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
