"""The GPUs of this machine: their inventory through NVML, and the MPS daemon that runs jobs side by side."""
