# Qwen2.5-7B.
MODEL_ARGS=()
