# Qwen3.5-4B.
MODEL_ARGS=()
