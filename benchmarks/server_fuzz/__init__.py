"""Servers, their OpenAPI documents, and requests made of these; ``fuzz_servers.py`` sends them."""
