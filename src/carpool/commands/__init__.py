"""The commands that work without a running service, one module each; `carpool.live.commands` holds the others.

A command reads options, calls the packages below and prints. `carpool.cli` imports a command when a user calls it.
"""
