"""Policies that give each job its GPUs alone and never suspend one."""
