"""The configuration of a run: frozen dataclasses, which import nothing of ours but each other.

A group holds flags and what follows from them. A slice holds the groups that some functions read together; it
is a base class of `slime.config.run.RunConfig`, so that the whole tree is passed and only the slice is seen.
"""
