"""Scheduling policies, grouped by family.

`registry` finds a policy by name, file or entry point; `base` is what every policy derives from. The families:
`simple` (one job at a time per GPU, no preemption), `preemptive`, `sharing` (pairs, Theorem 1), `joint` (the policy
`carpool`) and `pollux` (elastic jobs).
"""

from carpool.policies.registry import BUILT_IN, REQUIRED, known, make, options, summary

__all__ = ["BUILT_IN", "REQUIRED", "known", "make", "options", "summary"]
