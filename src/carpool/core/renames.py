"""Names that journals and snapshots of release 0.1 use, and the present names for them. Only readers use them."""

from collections.abc import Mapping
from typing import Any

EVENTS = {"Rekeyed": "PriorityChanged", "Revised": "ConstraintsChanged"}
EVENT_FIELDS = {"accum": "accumulation", "least_accum": "min_accumulation"}
JOB_FIELDS = {"alone_s": "duration_s", "least_accum": "min_accumulation"}
ALLOCATION_FIELDS = {"accum": "accumulation"}
RECORD_FIELDS = {
    "accum": "accumulation",
    "border": "pace_valid_until",
    "held_since": "gpus_since",
    "order": "seq",
    "pace": "pace_version",
}
COUNTERS = {
    "stirred": "needs_decision",
    "_submissions": "submissions",
    "_completed": "completed",
    "_completed_jct_s": "completed_jct_s",
}


def renamed(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the data with old names replaced by present ones."""
    return {names.get(key, key): value for key, value in data.items()}
