"""Measurements as a session would have made them, for tests that need no session."""

from carpool.profile.measure.raw import MeasuredMachine, Measurement, MeasurementRequest, Sample, Setting

MACHINE = MeasuredMachine("NVIDIA Test", 10**10, "1.0", "2026-01-01", "test")


def measured(mechanism, *jobs, run=0, series=0):
    """Jobs as (task, batch, accum, seconds)."""
    samples = tuple(
        Sample(Setting(t, b, s), seconds, 0.01, 50, 10**9 + b * 10**7 // s, 7 * 10**8) for t, b, s, seconds in jobs
    )
    return Measurement(
        MeasurementRequest(mechanism, tuple(sample.setting for sample in samples), run), samples, 1.0, series
    )
