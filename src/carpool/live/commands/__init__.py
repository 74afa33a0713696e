"""The commands of the live service, imported one at a time by `carpool.cli`, and what they print."""
