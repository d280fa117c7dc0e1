# Qwen2.5-14B-Instruct.
MODEL_ARGS=()
