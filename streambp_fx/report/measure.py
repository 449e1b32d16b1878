"""The old place of `streambp_fx.measure.step`."""

from ..measure.step import Measurement, MeasurementError, StepSpec, measure_step, run_isolated

__all__ = ["Measurement", "MeasurementError", "StepSpec", "measure_step", "run_isolated"]
