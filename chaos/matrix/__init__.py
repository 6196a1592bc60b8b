"""The kill matrix: every fault at every point, one small run for each, and a verdict on what it left.

The fast form runs without Ray. The processes are real, and so is what they run: ranks (workers.rank, with their process
group), keepers and the coordinator are the production classes, in processes of their own that are forked from one that
has everything imported. What stands in for Ray is small: sockets in the place of actor calls (wires.py), a parent that
restarts what dies (host.py), agents without a zygote of their own (agents.py). docs/chaos-matrix.md says what that
leaves out; the supervised form (supervised.py) covers it.
"""
