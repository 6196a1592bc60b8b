"""Faults: what a campaign can do to a run. Each states what it needs, and says why it cannot be done where that is."""
