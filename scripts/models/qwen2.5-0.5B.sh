# Qwen2.5-0.5B.
MODEL_ARGS=()
