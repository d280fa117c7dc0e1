# Qwen2.5-1.5B.
MODEL_ARGS=()
