#!/usr/bin/env bash
# A student learns from a teacher's log-probs of its own answers. MODEL=DIR and TEACHER=DIR are real ones, or
# TEACHER_URL=http://host:port/generate a teacher that runs already; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example on_policy_distillation

questions_or_calculations

# Starts a server for the teacher and waits until it answers. It ends with this script.
start_teacher() {
    local port="${TEACHER_PORT:-13141}" command
    if python -c 'import sglang' 2>/dev/null; then
        command=(python -m sglang.launch_server --skip-server-warmup)
    else
        command=(python -m slime.backends.embedded_engine)
    fi
    "${command[@]}" --model-path "$TEACHER" --host 127.0.0.1 --port "$port" >"$OUTPUT/teacher.log" 2>&1 &
    teacher=$!
    trap 'kill "$teacher" 2>/dev/null || true' EXIT
    until python -c "import httpx; httpx.get('http://127.0.0.1:$port/health').raise_for_status()" 2>/dev/null; do
        kill -0 "$teacher" 2>/dev/null || { tail -n 20 "$OUTPUT/teacher.log" >&2; exit 1; }
        sleep 1
    done
    TEACHER_URL="http://127.0.0.1:$port/generate"
}

if [[ -z "${TEACHER_URL:-}" ]]; then
    if [[ -z "${TEACHER:-}" ]]; then
        TEACHER="$OUTPUT/teacher"
        [[ -d "$TEACHER" ]] ||
            python "$REPOSITORY/tools/make_tiny_model.py" --output "$TEACHER" --hidden-size 64 --num-layers 2 --seed 9
    fi
    start_teacher
fi

python "$REPOSITORY/train.py" "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --rollout-shuffle \
    --use-opd \
    --opd-type sglang \
    --opd-kl-coef 1.0 \
    --rm-url "$TEACHER_URL" \
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func \
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    "$@"
