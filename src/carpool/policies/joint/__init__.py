"""The policy `carpool`: one objective for the guest, its hosts and the jobs that wait."""
