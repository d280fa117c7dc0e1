# Llama-3.1-8B-Instruct.
MODEL_ARGS=()
