"""A whole step as one native call: what a module computes is recorded once (recording.py) as a program (program.py),
which is shortened (fusion.py), compiled for the CPU kernels and run without Python (native.py, src/plan.cpp).

Any module whose layers are accelerated gets it, as long as it computes with what recording.py knows; else it runs as it
is. The results are the same to the last bit.
"""

from __future__ import annotations

from pellucid_model.kernels.plan.fusion import fuse
from pellucid_model.kernels.plan.native import Plan, PlanBatch, StepSampling, StepsRun
from pellucid_model.kernels.plan.program import Program
from pellucid_model.kernels.plan.recording import record
from pellucid_model.kernels.plan.rows import NotRecordable

__all__ = ["NotRecordable", "Plan", "PlanBatch", "Program", "StepSampling", "StepsRun", "fuse", "record"]
