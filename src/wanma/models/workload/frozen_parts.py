"""Workload of a decoder that is partly frozen, by adapters or by `train.parameter_groups`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from wanma.job.forecast.forecast import LayerWorkload, Workload
from wanma.job.forecast.operators import Matmul, Operator

_A, _B = ".lora_a", ".lora_b"  # as in `lora`, which needs torch


def apply_freezing_to_workload(
    workload: Workload,
    parameter_shapes: Mapping[str, tuple[int, ...]],
    block_container: str,
    is_frozen: Callable[[str], bool],
) -> Workload:
    """Return `workload` with its numbers of trained parameters, and the adapters' parameters and operators.

    Args:
        workload: workload of the decoder without adapters.
        parameter_shapes: shapes of all its parameters with those of adapters, by name, in their order.
        block_container: path of the module that holds its blocks.
        is_frozen: returns True if the parameter of a name is not trained.
    """
    first = next(
        (number for number, layer in enumerate(workload.layers) if layer.is_block), len(workload.layers)
    )
    owners = [number for number, layer in enumerate(workload.layers) for _ in range(layer.count)]
    """Index of the workload's layer, for the embedding, each block and the head."""
    parameters_by_block: list[dict[str, tuple[int, ...]]] = [{} for _ in owners]
    has_seen_blocks = False
    for name, size in parameter_shapes.items():
        index = (
            name.removeprefix(f"{block_container}.").partition(".")[0]
            if name.startswith(f"{block_container}.")
            else ""
        )
        has_seen_blocks |= index.isdecimal()
        block = first + int(index) if index.isdecimal() else (-1 if has_seen_blocks else 0)
        parameters_by_block[block][name] = size
    trained = [
        sum(_numel(size) for name, size in block_parameters.items() if not is_frozen(name))
        for block_parameters in parameters_by_block
    ]
    first_trained = next((number for number, elements in enumerate(trained) if elements), len(trained))
    tokens = workload.tokens_per_sample
    layers = []
    for number, layer in enumerate(workload.layers):
        blocks = [block for block, owner in enumerate(owners) if owner == number]
        adapters = {
            name: size for name, size in parameters_by_block[blocks[0]].items() if name.endswith((_A, _B))
        }
        layers.append(_apply_to_layer(layer, [trained[block] for block in blocks], adapters, tokens))
        layers[-1] = replace(
            layers[-1], layers_without_backward=sum(block < first_trained for block in blocks)
        )
    return replace(workload, layers=tuple(layers))


def _apply_to_layer(
    layer: LayerWorkload, trained: list[int], adapters: Mapping[str, tuple[int, ...]], tokens: int
) -> LayerWorkload:
    parameters = layer.parameters + sum(map(_numel, adapters.values()))
    mean = sum(trained) / layer.count
    is_fully_trained = all(elements == parameters for elements in trained)
    pairs = [(adapters[name], adapters[name.replace(_A, _B)]) for name in adapters if name.endswith(_A)]
    return replace(
        layer,
        parameters=parameters,
        trainable_parameters=None if is_fully_trained else int(mean) if mean == int(mean) else mean,
        operators=tuple(operator for a, b in pairs for operator in _lora_operators(a[1], a[0], b[0], tokens)),
    )


def _numel(size: tuple[int, ...]) -> int:
    elements = 1
    for extent in size:
        elements *= extent
    return elements


def _lora_operators(inputs: int, rank: int, outputs: int, tokens: int) -> list[Operator]:
    """Return an adapter's operators (`lora.LoRALinear.forward`) beside its layer, forward and backward."""

    def product(phase: str, m: int, n: int, k: int, batch_dimension: str) -> Operator:
        sample_elements = {"m": m * n + m * k, "k": m * k + k * n}[batch_dimension]
        fixed_elements = {"m": n * k, "k": m * n}[batch_dimension]
        matmul = Matmul(m, n, k, batch_dimension=batch_dimension)  # type: ignore[arg-type]  # "m" or "k"
        return Operator("product", phase, 1, float(sample_elements), float(fixed_elements), matmul)  # type: ignore[arg-type]

    def stream(phase: str, elements: int, kernels: int, execution_mode: str) -> Operator:
        return Operator(
            "elementwise",
            phase,  # type: ignore[arg-type]  # "forward" or "inputs"
            kernels,
            float(tokens * elements),
            execution_mode=execution_mode,  # type: ignore[arg-type]  # "eager" or "compiled"
        )

    return [
        product("forward", tokens, rank, inputs, "m"),
        product("forward", tokens, outputs, rank, "m"),
        # Scaled, and added to the layer's output.
        stream("forward", 5 * outputs, 2, "eager"),
        stream("forward", 3 * outputs, 1, "compiled"),
        stream("inputs", 2 * outputs, 1, "eager"),
        product("inputs", tokens, rank, outputs, "m"),
        product("weights", outputs, rank, tokens, "k"),
        product("inputs", tokens, inputs, rank, "m"),
        product("weights", rank, inputs, tokens, "k"),
        # The gradient of the input, which two products used.
        stream("inputs", 3 * inputs, 1, "eager"),
        stream("inputs", 3 * inputs, 1, "compiled"),
    ]
