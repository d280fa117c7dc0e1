#!/usr/bin/env bash
# GRPO of three roles: solvers, rewriters, a selector. MODEL=DIR trains a real one; see README.md.
# TWO_POLICIES=1 has one model write and another one select.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
if [[ -n "${TWO_POLICIES:-}" ]]; then
    # Of each policy; four GPUs in all.
    example multi_agent --rollout-num-gpus 1
    policies=(--policies "$REPOSITORY/examples/multi_agent/policies.yaml")
    policies+=(--num-gpus-per-node 4 --actor-num-gpus-per-node 1)
else
    example multi_agent
    policies=()
fi

# Rows with a prompt, not rendered by a chat template, and a label.
questions_or_calculations
echo "num_parallel: ${NUM_PARALLEL:-3}" >"$OUTPUT/agents.yaml"
[[ -z "${TWO_POLICIES:-}" ]] ||
    echo "role_policies: {solver: author, rewriter: author, selector: selector}" >>"$OUTPUT/agents.yaml"

launch "${SIZE_ARGS[@]}" "${policies[@]}" \
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
