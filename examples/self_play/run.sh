#!/usr/bin/env bash
# GRPO of a model that plays against what it was some rollouts ago. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example self_play --rollout-num-gpus 3

if [[ -z "${QUESTIONS:-}" ]]; then
    QUESTIONS="$OUTPUT/games.jsonl"
    python "$REPOSITORY/examples/self_play/make_data.py" --output "$QUESTIONS"
fi

launch "${SIZE_ARGS[@]}" \
    --num-gpus-per-node 4 \
    --sglang-config "$REPOSITORY/examples/self_play/fleet.yaml" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --rollout-shuffle \
    --custom-generate-function-path examples.self_play.game.play \
    --rollout-max-response-len 8 \
    --eval-prompt-data first "$QUESTIONS" \
    --eval-interval 5 \
    --num-steps-per-rollout 2 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
