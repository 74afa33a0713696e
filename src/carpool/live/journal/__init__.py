"""The journal on disk: its tables and how a damaged file is salvaged. No other package uses SQL."""
