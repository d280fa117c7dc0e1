# Qwen3-235B-A22B-Instruct-2507 and -Thinking-2507: Qwen3-235B-A22B with another base of its rotary embeddings.
: "${MODEL_ARGS_ROTARY_BASE:=5000000}"
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-235B-A22B.sh"
