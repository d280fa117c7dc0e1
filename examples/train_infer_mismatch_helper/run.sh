#!/usr/bin/env bash
# GRPO with importance weights of a function of one's own. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example train_infer_mismatch

questions_or_calculations

launch "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --rollout-shuffle \
    --rm-type math \
    --custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp \
    --custom-config-path "${MIS_CONFIG:-$REPOSITORY/examples/train_infer_mismatch_helper/mis.yaml}" \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
