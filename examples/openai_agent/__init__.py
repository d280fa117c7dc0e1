"""A model behind an agent that speaks the API of OpenAI and knows nothing of training."""
