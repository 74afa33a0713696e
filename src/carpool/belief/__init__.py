"""What is believed about speeds and slow-downs: a prior from profiles, learned from what jobs report.

`believe` makes a belief from a profile; `Belief` is the performance model that learns; `estimate` gives its answers
ranges and sources.
"""
