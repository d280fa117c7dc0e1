#!/usr/bin/env bash
# GRPO of three roles of one model: solvers, rewriters, a selector. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example multi_agent

# Rows with a prompt, not rendered by a chat template, and a label.
questions_or_calculations
echo "num_parallel: ${NUM_PARALLEL:-3}" >"$OUTPUT/agents.yaml"

launch "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --rollout-shuffle \
    --custom-generate-function-path \
    examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents \
    --custom-config-path "$OUTPUT/agents.yaml" \
    --rm-type math \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
