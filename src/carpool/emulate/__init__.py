"""Emulated GPUs: workers that iterate by the clock at the speed of a profile, so that a policy runs live without a GPU.

`gpus.py` describes the emulated GPUs of a service and predicts their speed. `residents.py` keeps the files by which
workers see each other, and `worker.py` is the program of a job: `carpool emulate`.
"""
