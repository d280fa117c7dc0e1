#!/usr/bin/env bash
# GRPO on trajectories that a program of its own writes to the rollout buffer. MODEL=DIR trains a real one; see
# README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example rollout_buffer --rollout-num-gpus 1

questions_or_calculations

# The buffer and a writer, which end with this script. BUFFER_URL is a buffer that runs already, with writers.
if [[ -z "${BUFFER_URL:-}" ]]; then
    port="${BUFFER_PORT:-13143}" started=()
    BUFFER_URL="http://127.0.0.1:$port"
    # Of the buffer, the writer and the run's engines, which all three look for it there.
    export SLIME_API_KEY="${SLIME_API_KEY:-$(python -c 'import secrets; print(secrets.token_urlsafe(32))')}"
    trap 'kill "${started[@]}" 2>/dev/null || true' EXIT
    python -P -m slime_plugins.rollout_buffer.buffer --port "$port" --file "$OUTPUT/buffer.sqlite" \
        >"$OUTPUT/buffer.log" 2>&1 &
    started+=($!)
    python -P -m examples.rollout_buffer.writer --buffer "$BUFFER_URL" >"$OUTPUT/writer.log" 2>&1 &
    started+=($!)
fi

python "$REPOSITORY/train.py" "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --rollout-function-path \
    slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout \
    --rollout-buffer-url "$BUFFER_URL" \
    --rollout-task-type outside \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
