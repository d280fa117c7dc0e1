# Qwen3.5-0.8B.
MODEL_ARGS=()
