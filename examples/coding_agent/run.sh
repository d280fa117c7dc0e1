#!/usr/bin/env bash
# GRPO of a model that repairs code in a sandbox. MODEL=DIR trains a real model; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example coding_agent

# Rows with a prompt, and in metadata source, function and cases.
if [[ -z "${QUESTIONS:-}" ]]; then
    QUESTIONS="$OUTPUT/bugs.jsonl"
    python "$REPOSITORY/examples/coding_agent/make_data.py" --output "$QUESTIONS"
fi

launch "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --rollout-shuffle \
    --custom-generate-function-path examples.coding_agent.repair.generate \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
