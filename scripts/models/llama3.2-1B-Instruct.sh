# Llama-3.2-1B-Instruct.
MODEL_ARGS=()
