# Qwen3-4B.
MODEL_ARGS=()
