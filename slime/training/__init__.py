"""What happens to a batch, whoever holds the weights."""
