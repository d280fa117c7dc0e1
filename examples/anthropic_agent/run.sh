#!/usr/bin/env bash
# GRPO through an agent that speaks the API of Anthropic. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example anthropic_agent

# Rows with a prompt, not rendered by a chat template, and a label.
questions_or_calculations

launch "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --rollout-shuffle \
    --custom-generate-function-path \
    examples.anthropic_agent.generate.generate \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
