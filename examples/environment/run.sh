#!/usr/bin/env bash
# GRPO in an environment of Gymnasium. MODEL=DIR trains a real model; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example environment

# Rows whose prompt and metadata the environment is given.
if [[ -z "${QUESTIONS:-}" ]]; then
    QUESTIONS="$OUTPUT/lake.jsonl"
    python "$REPOSITORY/examples/environment/make_data.py" --output "$QUESTIONS"
fi

launch "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --rollout-shuffle \
    --custom-generate-function-path examples.environment.lake.generate \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
