# Qwen2.5-3B.
MODEL_ARGS=()
