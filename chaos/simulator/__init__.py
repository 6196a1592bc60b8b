"""What a way to save costs a run, without the run: the production policies under simulated failures."""
