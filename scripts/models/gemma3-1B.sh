# Gemma 3 1B.
MODEL_ARGS=()
