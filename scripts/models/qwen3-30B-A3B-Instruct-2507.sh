# Qwen3-30B-A3B-Instruct-2507, -Thinking-2507 and Qwen3-Coder-30B-A3B-Instruct.
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-30B-A3B.sh"
