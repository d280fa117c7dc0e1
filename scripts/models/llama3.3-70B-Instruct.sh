# Llama-3.1-70B-Instruct and Llama-3.3-70B-Instruct.
MODEL_ARGS=()
