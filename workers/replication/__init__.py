"""Snapshots on more than one node: keepers keep copies of each other's shards, and give them out for a restore."""
