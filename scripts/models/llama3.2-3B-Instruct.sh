# Llama-3.2-3B-Instruct.
MODEL_ARGS=()
