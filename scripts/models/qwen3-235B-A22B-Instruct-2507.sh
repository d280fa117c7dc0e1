# Qwen3-235B-A22B-Instruct-2507 and -Thinking-2507.
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-235B-A22B.sh"
