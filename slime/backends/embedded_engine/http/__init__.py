"""The HTTP face of the engine: one module per family of endpoints."""
