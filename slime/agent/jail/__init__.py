"""The process inside a local sandbox. Standard library only: nothing else is there."""
