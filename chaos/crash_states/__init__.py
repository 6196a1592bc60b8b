"""What a power loss may leave of a run directory, state by state, and whether the real recovery copes with each."""
