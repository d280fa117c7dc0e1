"""The config groups, one file each: flags, what follows from them, which contradict each other."""
