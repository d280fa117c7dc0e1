# Qwen3-8B.
MODEL_ARGS=()
