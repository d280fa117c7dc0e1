#!/usr/bin/env bash
# GRPO of a model that talks to a user whom a second model plays. MODEL=DIR and USER_MODEL=DIR are real ones; see
# README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example simulated_user --rollout-num-gpus 2

if [[ -z "${QUESTIONS:-}" ]]; then
    QUESTIONS="$OUTPUT/customers.jsonl"
    python "$REPOSITORY/examples/simulated_user/make_data.py" --output "$QUESTIONS"
fi

# The trained model, and beside it one whose weights stay.
FLEET="$OUTPUT/fleet.yaml"
cat >"$FLEET" <<EOF
sglang:
  - name: policy
    server_groups: [{worker_type: regular, num_gpus: 1}]
  - name: user
    model_path: ${USER_MODEL:-$MODEL}
    update_weights: false
    server_groups: [{worker_type: regular, num_gpus: 1}]
EOF

launch "${SIZE_ARGS[@]}" \
    --num-gpus-per-node 3 \
    --sglang-config "$FLEET" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --rollout-shuffle \
    --custom-generate-function-path examples.simulated_user.desk.generate \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
