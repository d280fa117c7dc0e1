"""Responses that follow a grammar: JSON schemas, regular expressions, EBNF and structural tags."""
