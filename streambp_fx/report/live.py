"""The old place of `streambp_fx.measure.live_bytes`."""

from ..measure.live_bytes import LiveBytes, live_bytes_compiled, peak_live_bytes, peak_live_bytes_compiled

__all__ = ["LiveBytes", "live_bytes_compiled", "peak_live_bytes", "peak_live_bytes_compiled"]
