#!/usr/bin/env bash
# GRPO of a model that calculates with Python in a sandbox. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example retool

questions_or_calculations

launch "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --rollout-shuffle \
    --custom-generate-function-path examples.retool.generate.generate \
    --custom-rm-path examples.retool.reward.reward \
    --reward-key score \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
