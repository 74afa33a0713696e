"""A job in a notebook: its state as HTML, and a display that follows the job until it has ended.

IPython calls it through `SubmittedJob`. The text is updated from a thread that listens to the job's events, so that the
cell returns at once.
"""

import threading
import time
from collections.abc import Iterator
from html import escape
from typing import Any, Protocol

from carpool.errors import InputError

Row = dict[str, Any]
ENDED = ("finished", "failed", "cancelled")
COLOURS = {"finished": "#157347", "running": "#157347", "failed": "#b42318", "paused": "#8a5a00"}
EVERY_S = 1.0
"""Seconds between two looks at a job that runs: its progress grows without an event."""


class LiveJob(Protocol):
    """What a live display needs of a job."""

    id: str

    @property
    def connection(self) -> Any: ...

    def refresh(self) -> Row: ...


def job_html(row: Row) -> str:
    """Return a job's state as HTML. Everything that users wrote is escaped."""
    status = str(row["status"])
    colour = COLOURS.get(status, "#565c74")
    share = row.get("progress") or 0.0
    where = f" on {' '.join(row['on'])}" if row.get("on") else ""
    beside = f", beside job {', '.join(row['mates'])}" if row.get("mates") else ""
    why = f" ({row['reason']})" if row.get("reason") else ""
    bar = (
        f'<progress max="1" value="{share:.4f}" style="vertical-align:middle"></progress> {share:.0%}'
        if row.get("started")
        else ""
    )
    return (
        f"<div>job <b>{escape(str(row['job']))}</b> {escape(str(row['name']))}: "
        f'<span style="color:{colour};font-weight:600">{escape(status)}</span>'
        f"{escape(where + beside + why)} {bar}</div>"
    )


def states(job: LiveJob) -> Iterator[Row]:
    """Yield the row of a job now and whenever it may have changed, until it has ended."""
    row = job.refresh()
    yield row
    while row["status"] not in ENDED:
        began = time.monotonic()
        job.connection.wait_for(job.id, EVERY_S)
        time.sleep(max(0.0, 0.2 - (time.monotonic() - began)))
        row = job.refresh()
        yield row


def show_live(job: LiveJob) -> None:
    """Show a job in the output of the present cell, and keep it up to date in the background."""
    from IPython.display import HTML, display

    rows = states(job)
    handle = display(HTML(job_html(next(rows))), display_id=True)

    def follow() -> None:
        try:
            for row in rows:
                handle.update(HTML(job_html(row)))
        except InputError as error:  # the service is gone
            handle.update(HTML(f"<div>job {escape(job.id)}: {escape(str(error))}</div>"))

    threading.Thread(target=follow, name=f"carpool-job-{job.id}", daemon=True).start()
