"""A model behind an agent that speaks the API of Anthropic and knows nothing of training."""
