# Gemma 3 4B.
MODEL_ARGS=()
