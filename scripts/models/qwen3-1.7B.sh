# Qwen3-1.7B.
MODEL_ARGS=()
