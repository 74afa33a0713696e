"""The simulator. `simulate(workload, policy, setup)` runs jobs; `read` and `philly_like` return workloads."""

from carpool.sim.engine import Costs
from carpool.sim.generate import philly_like
from carpool.sim.metrics import Summary
from carpool.sim.run import Result, Setup, simulate
from carpool.sim.workload import Workload, read

__all__ = ["Costs", "Result", "Setup", "Summary", "Workload", "philly_like", "read", "simulate"]
