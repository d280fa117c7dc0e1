#!/usr/bin/env bash
# GRPO of a model that searches a local BM25 index. MODEL=DIR trains a real one; see README.md.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../../scripts/lib/example.sh"
example search_r1

# Rows {"contents": ...}, and questions with a label. Without them, facts about invented countries.
if [[ -z "${CORPUS:-}" ]]; then
    python -P -m examples.search_r1.make_data --output "$OUTPUT/data"
    CORPUS="$OUTPUT/data/corpus.jsonl" QUESTIONS="$OUTPUT/data/train.jsonl"
fi
[[ -n "${QUESTIONS:-}" ]] || fail "QUESTIONS: missing (wanted: questions about the passages of CORPUS)"
cat >"$OUTPUT/search.yaml" <<YAML
search_corpus: "$CORPUS"
search_top_k: 3
search_max_turns: 3
YAML

launch "${SIZE_ARGS[@]}" \
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
