# Qwen2.5-72B-Instruct.
MODEL_ARGS=()
