"""A user's function of scores: its callbacks, what they mean, and which of it kernels have."""
