#!/usr/bin/env bash
# GRPO whose engines never wait for the longest answer. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example fully_async --rollout-num-gpus "${ROLLOUT_GPUS:-1}"

# Rows with a prompt and a label.
questions_or_calculations

exec python "$REPOSITORY/train_async.py" "${SIZE_ARGS[@]}" \
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async \
    --max-staleness "${MAX_STALENESS:-2}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --rollout-shuffle \
    --rm-type math \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
