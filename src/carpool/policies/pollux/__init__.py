"""The policy `pollux`: GPUs and batches of elastic jobs, chosen for goodput in rounds."""
