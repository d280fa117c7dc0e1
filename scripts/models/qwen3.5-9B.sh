# Qwen3.5-9B.
MODEL_ARGS=()
