# Qwen3-0.6B.
MODEL_ARGS=()
