"""Primitive operations on the CPU, one after the other: the reference engine of other graphs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dlattn.dtypes import to_numpy
from dlattn.plans.base import Runnable
from dlattn.plans.host import host_array
from dlattn.problem import Geometry, Program, evaluate
from dlattn.problem.score import Array
from dlattn.runtime.target import Target


class Interpreter(Runnable):
    """Runs programs on host memory.

    Every tensor is rounded to its type when it is made; what has memory is stored at the end, so
    that outputs may share the memory of inputs. A tensor without memory lives until its last use.
    """

    name = "reference"

    def __init__(self, program: Program, geometry: Geometry, target: Target) -> None:
        super().__init__(geometry, target)
        self.program = program
        self._last_use = {
            role: number
            for number, step in enumerate(program.steps)
            for role in (*step.outputs.values(), *step.inputs.values())
        }

    @property
    def workspace_size(self) -> int:
        return 0

    def build(self) -> None:
        """Nothing to compile."""

    def execute(self, pointers: Mapping[str, int], workspace: int, stream: int) -> None:
        program, specs = self.program, self.geometry.tensors
        memory = {role: host_array(pointers[role], spec) for role, spec in specs.items()}
        made = {role for step in program.steps for role in step.outputs.values()}
        known: dict[str, Array] = {role: x for role, x in memory.items() if role not in made}
        for role, value in program.values.items():
            if value.constant is not None:
                known[role] = np.full(value.dim, value.constant, to_numpy(value.dtype))
        for number, step in enumerate(program.steps):
            inputs = {operand: known[role] for operand, role in step.inputs.items()}
            results = evaluate(step, inputs, program.values)
            for operand, role in step.outputs.items():
                value = program.values[role]
                with np.errstate(all="ignore"):
                    rounded = np.asarray(results[operand]).astype(to_numpy(value.dtype))
                known[role] = np.broadcast_to(rounded, value.dim)
            for role in {*step.inputs.values(), *step.outputs.values()}:
                if self._last_use[role] == number and role not in memory:
                    del known[role]
        for role in made & memory.keys():
            memory[role][...] = known[role]
