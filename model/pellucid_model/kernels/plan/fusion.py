"""Rewrites a program so that it does the same in fewer instructions. Every number stays the same to the last bit.

    a layer and what follows     activation, gate and residual go into the layer that they follow
    layers of one input          query, key and value, gate and up run together
    what comes last              is computed for the rows that are sampled, and for no others
    a norm and its layers        the norm is taken on the way in, where nothing else reads it

An instruction moves only where nothing between writes what it reads, and what it absorbs is read nowhere else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from pellucid_model.kernels.interface import Activation, PackedLinear
from pellucid_model.kernels.plan.program import (
    Activate,
    Attention,
    Combine,
    Copy,
    Gather,
    Instruction,
    Layer,
    Linear,
    Normalize,
    Operand,
    Program,
    Select,
    reads,
    renamed,
    writes,
)

MOST_LAYERS = 16
"""That run together; as in src/plan_step.h."""


def fuse(program: Program) -> None:
    """Rewrite the program in place."""
    _select_early(program)
    _Fusion(program).run()


def _select_early(program: Program) -> None:
    """What is read for the sampled rows alone is computed for them alone: what follows the last attention, mostly."""
    place = next(index for index, each in enumerate(program.instructions) if isinstance(each, Select))
    select, rest = program.instructions[place], program.instructions[place + 1 :]
    late = _read_by(select, program.instructions[:place])
    made = {operand.buffer for each in late for operand in writes(each)}
    inputs = dict.fromkeys(operand.buffer for each in (*late, select) for operand in reads(each))
    selected = {each: program.new_buffer(program.widths[each], "sampled") for each in inputs if each not in made}
    for buffer in made:
        program.phases[buffer] = "sampled"
    (hidden,), (answer,) = reads(renamed(select, selected)), writes(select)
    whole = program.is_whole(hidden) and program.is_whole(answer) and answer != program.logits
    program.instructions = [
        *(each for each in program.instructions[:place] if each not in late),
        *(Select(program.whole(buffer), program.whole(own)) for buffer, own in selected.items()),
        *(renamed(each, selected) for each in late),
        *(() if whole else (Copy(hidden, answer),)),
        *(renamed(each, {answer.buffer: hidden.buffer} if whole else {}) for each in rest),
    ]


def _read_by(select: Instruction, instructions: Sequence[Instruction]) -> list[Instruction]:
    """Instructions before it that nobody else reads, and that do the same to every row; in their order."""
    users: dict[int, list[Instruction]] = defaultdict(list)
    makers: Counter[int] = Counter()
    for each in (*instructions, select):
        makers.update(operand.buffer for operand in writes(each))
        for operand in reads(each):
            users[operand.buffer].append(each)
    late: list[Instruction] = [select]
    for each in reversed(instructions):
        buffers = [operand.buffer for operand in writes(each)]
        alone = all(makers[buffer] == 1 and users[buffer] and set(users[buffer]) <= set(late) for buffer in buffers)
        if alone and not isinstance(each, Attention | Gather):
            late.append(each)
    return late[:0:-1]


def _layer_activation(activate: Activate) -> Activation | None:
    """The function, where layers can end in it."""
    return cast("Activation", activate.kind) if activate.kind in get_args(Activation) else None


class _Fusion:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._list: list[Instruction | None] = list(program.instructions)
        """None where an instruction has gone into another."""
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._writers: dict[int, list[int]] = defaultdict(list)
        for index, instruction in enumerate(program.instructions):
            for operand in reads(instruction):
                self._readers[operand.buffer].append(index)
            for operand in writes(instruction):
                self._writers[operand.buffer].append(index)

    def run(self) -> None:
        for index, instruction in enumerate(self._program.instructions):
            if isinstance(instruction, Combine) and isinstance(instruction.b, Operand):
                self._absorb_gate(index, instruction, instruction.b)
                self._absorb_residual(index, instruction, instruction.b)
        for index, instruction in enumerate(self._program.instructions):
            if isinstance(instruction, Activate):
                self._absorb_activation(index, instruction)
        self._join_layers()
        for index, instruction in enumerate(self._program.instructions):
            if isinstance(instruction, Normalize):
                self._absorb_norm(index, instruction)
        self._program.instructions = [each for each in self._list if each is not None]

    def _absorb_gate(self, index: int, product: Combine, b: Operand) -> None:
        """activation(gate(x)) * up(x)"""
        for gate_operand, up_operand in ((product.a, b), (b, product.a)):
            activation, up = self._only_source(gate_operand, index), self._plain_layer(up_operand, index)
            if product.kind != "multiply" or up is None or activation is None:
                continue
            activate = self._list[activation]
            if not isinstance(activate, Activate) or (kind := _layer_activation(activate)) is None:
                continue
            gate = self._plain_layer(activate.x, activation)
            if gate is None or not self._go_together(gate, up, index):
                continue
            gate_packed, (x, packed) = self._layer(gate)[1], self._layer(up)
            self._replace(index, (gate, up, activation), x, Layer(packed, product.out, gate_packed, kind))
            return

    def _absorb_residual(self, index: int, total: Combine, b: Operand) -> None:
        """residual + layer(x)"""
        for residual, operand in ((total.a, b), (b, total.a)):
            layer = self._only_source(operand, index) if total.kind == "add" else None
            linear = None if layer is None else self._list[layer]
            if not isinstance(linear, Linear) or layer is None or not self._may_move(layer, index):
                continue
            (made,) = linear.layers
            gated = made.gate is not None or made.activation is None
            if made.residual is None and gated and self._program.is_whole(residual):
                self._replace(index, (layer,), linear.x, replace(made, residual=residual, out=total.out))
                return

    def _absorb_activation(self, index: int, activate: Activate) -> None:
        layer = self._plain_layer(activate.x, index) if self._list[index] is activate else None
        kind = _layer_activation(activate)
        if layer is not None and kind is not None and self._may_move(layer, index):
            x, packed = self._layer(layer)
            self._replace(index, (layer,), x, Layer(packed, activate.out, activation=kind))

    def _join_layers(self) -> None:
        groups: dict[object, list[int]] = defaultdict(list)
        for index, each in enumerate(self._list):
            if isinstance(each, Linear) and each.layers[0].residual is None:
                groups[(each.x, each.layers[0].packed.format)].append(index)
        for first, *others in groups.values():
            for index in others:
                linear, joined = self._list[index], self._list[first]
                if not isinstance(linear, Linear) or not isinstance(joined, Linear):
                    continue
                fresh = len(self._writers[linear.layers[0].out.buffer]) == 1
                if fresh and len(joined.layers) < MOST_LAYERS and self._may_move(first, index):
                    self._list[first] = replace(joined, layers=(*joined.layers, *linear.layers))
                    self._list[index] = None

    def _absorb_norm(self, index: int, normalize: Normalize) -> None:
        readers = {reader for reader in self._readers[normalize.out.buffer] if self._list[reader] is not None}
        last = max(readers, default=index)
        linear = self._list[last]
        whole = self._program.is_whole(normalize.x) and normalize.size == normalize.x.width
        if len(readers) != 1 or not isinstance(linear, Linear) or not whole or not self._may_move(index, last):
            return
        residuals = {layer.residual.buffer for layer in linear.layers if layer.residual is not None}
        outs = {layer.out.buffer for layer in linear.layers}
        only_input = linear.x == normalize.out and normalize.out.buffer not in residuals
        if only_input and normalize.x.buffer not in outs:
            self._list[last] = replace(linear, x=normalize.x, norm=normalize.norm)
            self._list[index] = None

    def _only_source(self, operand: Operand, reader: int) -> int | None:
        """Index of the instruction that makes a whole buffer for one reader."""
        sources = [index for index in self._writers[operand.buffer] if self._list[index] is not None]
        alone = len(sources) == 1 and len(self._readers[operand.buffer]) == 1 and sources[0] < reader
        return sources[0] if alone and self._program.is_whole(operand) else None

    def _plain_layer(self, operand: Operand, reader: int) -> int | None:
        """The same, where it is a layer that nothing has gone into."""
        source = self._only_source(operand, reader)
        linear = None if source is None else self._list[source]
        if not isinstance(linear, Linear):
            return None
        (layer,) = linear.layers
        return source if layer.gate is None and layer.activation is None and layer.residual is None else None

    def _go_together(self, gate: int, up: int, index: int) -> bool:
        (x, a), (other_x, b) = self._layer(gate), self._layer(up)
        alike = (a.in_features, a.out_features, a.format) == (b.in_features, b.out_features, b.format)
        return x == other_x and alike and self._may_move(gate, index) and self._may_move(up, index)

    def _layer(self, index: int) -> tuple[Operand, PackedLinear]:
        """A layer's input and weights."""
        linear = self._list[index]
        if not isinstance(linear, Linear):
            raise TypeError(f"instruction {index} is no layer")
        return linear.x, linear.layers[0].packed

    def _may_move(self, index: int, to: int) -> bool:
        """Whether nothing from one instruction to the other writes what the first one reads."""
        instruction = self._list[index]
        sources = [] if instruction is None else reads(instruction)
        return not any(index < writer < to for operand in sources for writer in self._writers[operand.buffer])

    def _replace(self, index: int, absorbed: tuple[int, ...], x: Operand, layer: Layer) -> None:
        """Unless the layer would write what it reads: threads read its rows when others have written theirs."""
        if layer.out.buffer == x.buffer:
            return
        for each in absorbed:
            self._list[each] = None
        self._list[index] = Linear(x, (layer,))
        # The rewritten instruction reads x and its residual where it stands now.
        for operand in reads(Linear(x, (layer,))):
            self._readers[operand.buffer] = [
                *(reader for reader in self._readers[operand.buffer] if reader not in (*absorbed, index)),
                index,
            ]
