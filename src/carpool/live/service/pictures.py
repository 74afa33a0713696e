"""What the dashboard draws: GPUs over time, forecasts, a job's trace, and what another policy would have done.

Results are plain data. Everything here is read through the HTTP API, which any client may use.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from carpool import policies
from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.live.clock import Clock
from carpool.live.insight.forecaster import Forecaster
from carpool.live.insight.places import Place
from carpool.live.insight.what_if import WhatIf
from carpool.live.service.inventory import Inventory
from carpool.live.service.jobs import Row
from carpool.live.service.queries import Queries
from carpool.live.service.records import Recorder

HORIZON_S = 3600.0
"""Seconds of the past and of the future that are shown."""


@dataclass
class Pictures:
    """The data of pictures."""

    clock: Clock
    inventory: Inventory
    queries: Queries
    recorder: Recorder
    forecaster: Forecaster
    what_if: WhatIf = field(default_factory=WhatIf)

    def timeline(self, since: float | None) -> Row:
        """Return the places of jobs that lasted beyond a moment; None: during the last hour."""
        now = self.clock.now()
        places = self.recorder.places.since(now - HORIZON_S if since is None else since)
        gpus = [slot.label for node in self.inventory.by_name for slot in node.slots]
        return {"now": now, "gpus": gpus, "places": self._place_rows(places, math.inf)}

    def forecast(self) -> Row:
        """Return when each job is expected to start and to end, and the places of the next hour."""
        ahead = self.forecaster.ahead()
        until = ahead.made + HORIZON_S
        jobs = {
            job: {
                name: [getattr(one, name) for one in (times.believed, times.early, times.late)]
                for name in ("start", "end")
            }
            for job, times in ahead.times.items()
        }
        places = [one for one in ahead.places if one.start < until]
        return {"now": self.clock.now(), "made": ahead.made, "jobs": jobs, "places": self._place_rows(places, until)}

    def _place_rows(self, places: Iterable[Place], until: float) -> list[Row]:
        labels = self.inventory.labels()
        return [
            {
                "job": one.job,
                "user": one.user,
                "on": [_label(labels, gpu) for gpu in one.gpus],
                "kind": one.kind,
                "start": one.start,
                "end": None if one.end is None else min(one.end, until),
            }
            for one in places
        ]

    def trace(self, job: str) -> Row:
        """Return how far a job was and how fast, and where it ran, over time."""
        labels, now = self.inventory.labels(), self.clock.now()
        if job in self.queries.state.jobs:
            points = [one.row() for one in self.recorder.trace(job, now)]
            return {"now": now, "points": points, "places": self.recorder.places_of(job, labels)}
        row = self.queries.show(job)
        places = [{**one, "on": [_label(labels, gpu) for gpu in one["gpus"]]} for one in row.get("places", ())]
        return {"now": now, "points": row.get("trace", []), "places": places}

    def policies(self) -> list[Row]:
        """Return the built-in policies by name, with a line about each."""
        return [{"name": name, "summary": policies.summary(kind)} for name, kind in policies.BUILT_IN.items()]

    async def replayed(self, policy: str) -> Row:
        """Return what another policy would have done with the jobs that ran here."""
        sizes = [len(node.slots) for node in self.inventory.nodes]
        if not sizes or not max(sizes):
            raise InputError("this service has no GPUs; `carpool replay --cluster` simulates others")
        rows = await self.queries.workload()
        cluster, per_gpu = f"{len(sizes)}x{max(sizes)}", self.queries.state.jobs_per_gpu
        return await self.what_if.ask(rows, cluster, per_gpu, self.queries.policy, policy)


def _label(labels: Mapping[GpuId, str], gpu: GpuId) -> str:
    return labels.get(gpu, f"GPU {gpu}")
