"""Discrete-event model of the megakernel on W ranks: predictions, never measurements.

``simulate`` runs the kernel's own ticket order (``tile_order.TileOrder``) and its dependency counts with rates and
delays of a ``Machine``; ``calibrate`` takes those rates from a benchmark file.
"""

from mok_megatron.simulator.calibrate import Measurement, calibrate, load_measurements, predict
from mok_megatron.simulator.engine import Outcome, simulate
from mok_megatron.simulator.machine import Machine, Policy
from mok_megatron.simulator.traffic import Traffic, build_traffic, sample_routing

__all__ = [
    "Machine",
    "Measurement",
    "Outcome",
    "Policy",
    "Traffic",
    "build_traffic",
    "calibrate",
    "load_measurements",
    "predict",
    "sample_routing",
    "simulate",
]
