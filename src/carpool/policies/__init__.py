"""Scheduling policies, grouped by family.

`registry` finds a policy by name, file or entry point; every policy derives from `base.BasePolicy`. The families:
`simple` (each job alone on its GPUs, no preemption), `preemptive`, `sharing` (pairs of jobs, Theorem 1), `joint` (the
policy `carpool`) and `pollux` (elastic jobs). `registry` says how to add a policy.
"""

from carpool.policies.registry import BUILT_IN, REQUIRED, known, make, options, summary

__all__ = ["BUILT_IN", "REQUIRED", "known", "make", "options", "summary"]
