"""The journal on disk, the only place that knows SQL: its tables, and what a damaged file still tells."""
