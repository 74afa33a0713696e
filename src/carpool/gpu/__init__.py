"""The GPUs of this machine: what NVML tells about them, and the MPS daemon that lets jobs run side by side."""
