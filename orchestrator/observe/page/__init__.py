"""The status page: what a run is doing now, for people, and as one JSON document for scripts (docs/status.md)."""
