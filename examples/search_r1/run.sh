#!/usr/bin/env bash
# GRPO of a model that asks a search server. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example search_r1

# Rows {"contents": ...}, and questions with a label. Without them, facts about invented countries.
if [[ -z "${CORPUS:-}${SEARCH_URL:-}" ]]; then
    python -P -m examples.search_r1.make_data --output "$OUTPUT/data"
    CORPUS="$OUTPUT/data/corpus.jsonl" QUESTIONS="$OUTPUT/data/train.jsonl"
fi
[[ -n "${QUESTIONS:-}" ]] || fail "QUESTIONS: missing (wanted: questions about the passages that are searched)"

# Starts a server over CORPUS and waits until it answers. It ends with this script.
start_search() {
    local port="${SEARCH_PORT:-13142}"
    SEARCH_URL="http://127.0.0.1:$port"
    python -P -m examples.search_r1.server --corpus "$CORPUS" --port "$port" >"$OUTPUT/search.log" 2>&1 &
    search=$!
    trap 'kill "$search" 2>/dev/null || true' EXIT
    until python -c "import httpx; httpx.get('$SEARCH_URL/health').raise_for_status()" 2>/dev/null; do
        kill -0 "$search" 2>/dev/null || { tail -n 20 "$OUTPUT/search.log" >&2; exit 1; }
        sleep 1
    done
}

[[ -n "${SEARCH_URL:-}" ]] || start_search
cat >"$OUTPUT/search.yaml" <<YAML
search_url: "$SEARCH_URL"
search_top_k: 3
search_max_turns: 3
YAML

python "$REPOSITORY/train.py" "${SIZE_ARGS[@]}" \
    --prompt-data "$QUESTIONS" \
    --input-key prompt \
    --label-key label \
    --apply-chat-template \
    --rollout-shuffle \
    --custom-generate-function-path examples.search_r1.generate_with_search.generate \
    --custom-rm-path examples.search_r1.generate_with_search.reward_func \
    --custom-config-path "$OUTPUT/search.yaml" \
    --num-steps-per-rollout 1 \
    --use-dynamic-batch-size \
    --max-tokens-per-gpu 8192 \
    --advantage-estimator grpo \
    --eps-clip 0.2 \
    --eps-clip-high 0.28 \
    "$@"
