"""Discrete-event model of the megakernel on W ranks: predictions, never measurements.

``simulate`` runs the kernel's own ticket order (``tile_order.TileOrder``) and its dependency counts with rates and
delays of a ``Machine``; ``calibrate`` takes those rates from a benchmark file.
"""

from mok_megatron.simulator.calibrate import Measurement, calibrate, calibrated_machine, load_measurements, predict
from mok_megatron.simulator.engine import Outcome, simulate
from mok_megatron.simulator.machine import Epilogues, Machine, Policy
from mok_megatron.simulator.traffic import Traffic, build_traffic, named_routing, sample_routing

__all__ = [
    "Epilogues",
    "Machine",
    "Measurement",
    "Outcome",
    "Policy",
    "Traffic",
    "build_traffic",
    "calibrate",
    "calibrated_machine",
    "load_measurements",
    "named_routing",
    "predict",
    "sample_routing",
    "simulate",
]
