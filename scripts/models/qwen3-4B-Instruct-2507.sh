# Qwen3-4B-Instruct-2507.
MODEL_ARGS=()
