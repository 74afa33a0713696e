"""Beliefs about speeds and slow-downs: a prior from profiles, updated by what jobs report.

`believe` makes a belief from a profile. `Belief` is the performance model that learns. `estimate` adds a range and a
source to its answers.
"""
