"""Two policies that play one game, each trained on what it said itself."""
