"""Campaigns: seeded random faults against a real supervised run, which has to finish once they stop."""
