#!/usr/bin/env bash
# Evaluation of several tasks, each with its own data, reward and sampling. MODEL=DIR is a real model, DATASETS
# the folder with its data; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
with_own_data="${MODEL:+yes}"
example eval_multi_task

if [[ -z "$with_own_data" ]]; then
    DATASETS="$OUTPUT/datasets"
    export DATASETS
    python "$REPOSITORY/examples/eval_multi_task/make_data.py"
    sed 's/max_response_len: 16384/max_response_len: 32/' "$REPOSITORY/examples/eval_multi_task/multi_task.yaml" \
        >"$OUTPUT/multi_task.yaml"
    EVAL_CONFIG="$OUTPUT/multi_task.yaml"
fi
export DATASETS

# --num-rollout 0 evaluates and trains nothing; any training run takes the same two eval flags.
launch "${SIZE_ARGS[@]}" \
    --num-rollout 0 \
    --disable-rollout-global-dataset \
    --debug-rollout-only \
    --rollout-num-gpus "${ROLLOUT_NUM_GPUS:-1}" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --eval-config "${EVAL_CONFIG:-$REPOSITORY/examples/eval_multi_task/multi_task.yaml}" \
    --eval-interval 1 \
    "$@"
