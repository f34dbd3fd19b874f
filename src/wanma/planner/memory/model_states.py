"""Model states of one rank: parameters, gradients and optimizer state, in bytes.

Sharded states follow Rajbhandari et al. 2020, section 5; FSDP2's additional memory follows its own behaviour
(one unit of communication per block, another for the rest), which tests measure. Frameworks with unsharded
copies follow Megatron-LM: 2 bytes of weights, 2 or 4 of gradients, and 12 of state per parameter, which a
distributed optimizer shards over the data ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from wanma.job.forecast.forecast import Workload
from wanma.job.plan.plan import UPDATED_TOGETHER, Plan
from wanma.job.sections.job import TrainSection
from wanma.planner.cost.decoder_layers import Software
from wanma.planner.cost.gradient_collectives import error_bytes
from wanma.planner.memory.activations import BYTES


class Parameters(NamedTuple):
    """Numbers of parameters of one pipeline rank, on one rank of `tp`."""

    blocks: float
    """Parameters of its blocks without routed experts."""
    experts: float
    """Parameters of routed experts, on one rank of `ep`."""
    ends: float
    """Parameters of layers that are no blocks: embedding, head."""
    block: float
    """Parameters of its largest block, with this rank's experts."""
    shapes: float = 0.0
    """Elements of its products' matrices, one of every shape."""
    first: float = 0.0
    """Parameters of layers before the blocks, such as an embedding; backward reaches them last."""
    embedding: float = 0.0
    """Parameters of `first` that are one tensor."""
    routed: float = 0.0
    """Parameters of the routed experts of its largest block."""
    tensors: tuple[tuple[float, float], ...] = ()
    """(elements, number) of large tensors that are known one by one; the others may be of any size."""
    trained_share: float = 1.0
    """Trained share of all parameters, 0 .. 1."""
    trained_blocks: float = 1.0
    """Trained share of the blocks' parameters."""
    trained_first: float = 1.0
    """Trained share of the parameters before the blocks."""
    trained_last: float = 1.0
    """Trained share of the parameters after the blocks."""

    @property
    def trained_ends(self) -> float:
        """Return the trained share of the parameters outside the blocks."""
        last = self.ends - self.first
        return (self.first * self.trained_first + last * self.trained_last) / self.ends if self.ends else 1.0

    @property
    def held(self) -> float:
        """Return the number of all its parameters."""
        return self.blocks + self.experts + self.ends

    def smaller(self, elements: float) -> float:
        """Return the number of parameters in tensors of fewer elements, as far as sizes are known."""
        return max(self.held - sum(size * count for size, count in self.tensors if size >= elements), 0.0)


class State(NamedTuple):
    """Model states of one rank, in bytes."""

    parameters: float
    """Parameters, including gathered ones."""
    gathered: float
    """Parameters that are gathered for a step."""
    buffers: float
    """Exchange buffers: this rank's part of memory that ranks share; once used it stays."""
    optimizer: float
    """Optimizer state, with an averaged copy of the weights, error feedback, and the states of sites."""
    accumulated: float
    """Gradients that exist from one micro-batch to the next."""
    last: float
    """Gradients of layers after the blocks, as one backward makes them: first of all."""
    reducing: float
    """Additional gradients while backward reduces a block's gradients."""
    made: float
    """Gradients of the layers that backward has passed when it reaches its last block, with their reduction
    buffers."""
    added: float
    """Last gradient of a micro-batch, before it is added to the sum of earlier ones."""
    final: float
    """All gradients, as backward ends, with their reduction buffers."""
    let_go: float
    """Part of `gathered` that is freed when backward ends."""
    receiving: float
    """Parts that come from other ranks, beside `final`."""
    late: float
    """Gradient tensor that backward makes last."""
    late_buffer: float
    """Reduction buffer of the last unit's gradients, as far as it has no room in freed memory."""
    host: float
    disk: float


def weight_bytes(workload: Workload, plan: Plan, *, rounds_frozen: bool) -> float:
    """Return the bytes of a whole model's weights as they are stored and saved."""
    master = 8.0 if plan.precision == "fp64" else 4.0
    trained = workload.parameters * workload.trained_share
    frozen = _frozen_bytes(plan, BYTES[plan.precision], master) if rounds_frozen else master
    return trained * master + (workload.parameters - trained) * frozen


def _frozen_bytes(plan: Plan, compute: float, master: float) -> float:
    """Return the bytes of one element of a frozen weight; weights gathered in fp8 are cast from fp32."""
    return master if plan.fp8 and plan.shard == "parameters" and plan.tp == 1 else compute


COMPRESSED_TOGETHER_BYTES = 1 << 24
"""Bytes of gradients that are compressed in one go; a test compares it with `collectives.compression`."""
_COPIES = 3
"""Approximate number of copies of those gradients that compression and decompression take beside them."""

STATE_COPIES = {"adamw": (2, 2), "sgd": (1, 1), "plain sgd": (0, 0), "muon": (1, 2), "adafactor": (0, 0)}
"""Elements of optimizer state per parameter, of blocks and of other layers. AdamW keeps two moments, SGD a
momentum if any; Muon keeps one for the blocks' matrices and leaves the rest to AdamW; Adafactor keeps a row
and a column for each matrix, which is next to nothing."""


def rule_of(train: TrainSection) -> str:
    """Return the key of `STATE_COPIES` for a job."""
    return "plain sgd" if train.optimizer == "sgd" and train.momentum == 0 else train.optimizer


def state_elements(workload: Workload, train: TrainSection) -> float:
    """Return the number of elements of the whole model's optimizer state."""
    of_blocks, of_ends = STATE_COPIES[rule_of(train)]
    return sum(
        (of_blocks if layer.is_block or layer.count > 1 else of_ends)
        * (layer.count * layer.parameters * layer.trained_share)
        for layer in workload.layers
    )


def state_of(
    mine: Parameters,
    plan: Plan,
    optimizer: str,
    *,
    micro_batches: int,
    weight_average: bool,
    software: Software,
) -> State:
    """Return the model states of one rank, in bytes.

    Args:
        optimizer: key of `STATE_COPIES`, as `rule_of` returns it.
        micro_batches: largest number of micro-batches of one step and rank.
    """
    trained_share = mine.trained_share
    sharded_blocks = mine.blocks / plan.shard_ranks
    if mine.experts:
        sharded_blocks += mine.experts / plan.expert_ranks[1]
    sharded_ends = mine.ends / plan.shard_ranks
    of_blocks, of_ends = STATE_COPIES[optimizer]
    elements = of_blocks * sharded_blocks * mine.trained_blocks + of_ends * sharded_ends * mine.trained_ends
    shards = sharded_blocks + sharded_ends
    if software.weights == "copies":
        return _copies(mine, shards, elements, trained_share, software)
    return _shards(
        mine,
        shards,
        elements,
        plan,
        micro_batches,
        weight_average,
        trained_share,
        shares_memory=software.shares_memory(plan),
        has_common_weights=software.has_common_weights(plan),
        rounds_frozen=software.rounds_frozen,
    )


def _copies(
    mine: Parameters, shards: float, elements: float, trained_share: float, software: Software
) -> State:
    """Return the model states of frameworks with unsharded copies of weights (Megatron-LM)."""
    gradients = mine.held * software.accumulated_bytes * trained_share
    if software.empty_gradients:
        gradients += 2 * mine.shapes
    return State(
        parameters=2 * mine.held,
        gathered=0.0,
        buffers=0.0,
        optimizer=4 * (elements + shards * trained_share),
        accumulated=gradients,
        last=0.0,
        reducing=0.0,
        made=0.0,
        added=0.0,
        final=gradients,
        let_go=0.0,
        receiving=0.0,
        late=0.0,
        late_buffer=0.0,
        host=0.0,
        disk=0.0,
    )


def _shards(  # noqa: C901, PLR0915  # one balance of many terms that share their cases
    mine: Parameters,
    shards: float,
    elements: float,
    plan: Plan,
    micro_batches: int,
    weight_average: bool,
    trained_share: float,
    *,
    shares_memory: tuple[bool, bool],
    has_common_weights: bool,
    rounds_frozen: bool,
) -> State:
    """Return the model states of master weights in shards (FSDP2, or one shard)."""
    master = 8 if plan.precision == "fp64" else 4
    compute = BYTES[plan.precision]
    # FSDP2 computes with a copy of the weights in compute precision beside the shards of the master weights,
    # also with one shard; plans that compute with the state itself are handled below. On a GPU it gathers
    # the next block while one computes.
    # In a pipeline blocks stay gathered after their backward, and gradients unsharded to the step's end.
    around = 1 if plan.device == "cpu" else 2
    away = plan.offload_parameters != "none"
    by_block = (plan.shard == "parameters" or away) and plan.pp == 1
    gathered = mine.ends + around * mine.block if by_block else mine.held
    frozen = _frozen_bytes(plan, compute, master) if rounds_frozen else float(master)
    parameters = shards * (master * trained_share + frozen * (1 - trained_share))
    # Where a step keeps all weights gathered, frozen ones that need no cast are not gathered. Every rank
    # stores all of them, unless ranks compute with common weights.
    copied = 1.0
    if rounds_frozen and frozen == compute and not (by_block or away):
        copied = trained_share
        if not has_common_weights:
            parameters = shards * master * trained_share + mine.held * frozen * (1 - trained_share)

    # Gradients of one unit are copied into one buffer to be reduced. Without reduction at every
    # micro-batch, unsharded gradients are accumulated in fp32 until the last.
    # On a CPU they are one unit where they are unsharded anyway (`parallel.shard`), and with one shard the
    # buffer becomes the gradient.
    whole_kind = plan.shard in ("none", "optimizer")
    one_unit = plan.device == "cpu" and whole_kind and not away
    unit = mine.held if one_unit else max(mine.ends, mine.block)
    # The layers outside the blocks are one unit, whose unsharded gradients wait for the last of them.
    waiting = mine.ends - mine.first
    behind = max(1 - (mine.first + mine.block) / mine.held, 0.0) if mine.held else 0.0
    accumulates = micro_batches > 1 and (plan.pp > 1 or whole_kind)
    # Buffers for gathering a unit and for reducing its gradients are in shared memory. Layers outside the
    # blocks are gathered first, and stay there until the first block is gathered; where a block is larger,
    # the next one has no room in the hole that they leave. Unsharded experts are not exchanged there.
    # Common weights are not gathered at all: in 16 bits there is one copy of them beside the shards, in 32
    # bits the shards are that copy.
    shards_share, replicas_share = shares_memory
    buffers, reduced, alone = 0.0, float(master), 0.0
    if shards_share and plan.shard_ranks > 1:
        if mine.experts and plan.expert_ranks[1] == 1:
            alone = mine.experts if one_unit else mine.routed
        block = mine.block - (0.0 if one_unit else alone)
        together = mine.ends + block * (2 if block > mine.ends else 1)
        exchanged = mine.held - alone if one_unit else max(mine.ends, block)
        gathering = (exchanged if one_unit else together) * compute
        if has_common_weights:
            gathered, gathering = (mine.routed if by_block else mine.experts) if alone else 0.0, 0.0
            # Shards of frozen weights are parts of the common copy.
            beside = trained_share if rounds_frozen and frozen == compute else 1.0
        buffers, reduced = max(gathering, exchanged * master * trained_share), 0.0
        if has_common_weights and compute != master:
            buffers += (mine.blocks + mine.ends) / plan.shard_ranks * compute * beside
            if mine.experts and not alone:
                buffers += mine.experts / plan.expert_ranks[1] * compute * beside
    if accumulates:
        accumulated = mine.held * master
        block = 0.0 if one_unit else mine.block
        reducing = 0.0 if compute == master else (waiting + block) * compute
        made = reducing
        final = accumulated + unit * reduced + alone * master
    else:
        accumulated = shards * master if micro_batches > 1 else 0.0
        reducing = waiting * compute + (0.0 if one_unit else mine.block * (compute + reduced))
        made = mine.held * behind * compute if one_unit else reducing
        if micro_batches == 1 and not one_unit:
            made += behind * shards * master
        if one_unit and plan.shard_ranks == 1:
            final = mine.held * (compute + master)
        else:
            final = shards * master + unit * (compute + reduced) + alone * master
            if accumulated:  # the reduced gradients, before they are added to earlier micro-batches
                final += unit * master / plan.shard_ranks
    # Gloo's reduce-scatter receives the parts of all other ranks at once.
    receiving = 0.0
    if plan.device == "cpu" and not shards_share:
        receiving = unit * master * (1 - 1 / plan.shard_ranks)
    gathered *= copied
    # FSDP2 frees gathered weights before it reduces; but where they stay gathered from one micro-batch to the
    # next, gradients are reduced beside them, unless they wait for the last.
    let_go = gathered * compute if by_block or accumulates or micro_batches == 1 else 0.0
    late, late_buffer = mine.embedding * compute, receiving
    if reduced and not (one_unit and let_go >= unit * reduced):
        late_buffer += unit * reduced
    if reduced and accumulated and not accumulates:
        late_buffer += unit * master / plan.shard_ranks
    if has_common_weights and compute != master:
        # Without common weights the sum has room in freed gathered weights; in 32 bits, where the shards were
        # before they became parts of the common weights.
        late_buffer += unit * master / plan.shard_ranks

    added = 0.0
    if plan.computes_with_state:  # gradients are summed in place
        gathered = let_go = 0.0
        reducing = 0.0 if accumulates else waiting * master
        made = 0.0 if accumulates else mine.held * behind * master
        added = mine.first * master if accumulates else 0.0
        final, late, late_buffer = mine.held * master, mine.embedding * master, 0.0
        if plan.replicas > 1 and not plan.compressions:
            together = min(final, plan.bucket_bytes)
            if plan.hierarchical:  # received parts of a bucket wait to be added up
                final += 2 * together
            elif replicas_share:
                # Small gradients are summed in memory that the ranks share, and stay there.
                small = mine.smaller(plan.bucket_bytes / master) * master
                made, final = max(made - behind * small, 0.0), final - small
                buffers = small * trained_share
            else:
                final += together

    if plan.compressions and plan.data_ranks * plan.cp > 1:
        final += _COPIES * min(mine.held * master, COMPRESSED_TOGETHER_BYTES)

    averaged = trained_share if rounds_frozen else 1.0
    average = shards * master * averaged * int(weight_average)
    outer, under_way = (copies * shards * master * trained_share for copies in _between_sites(plan))
    remainder = error_bytes(plan, mine.held, shards)
    state = elements * master
    elsewhere = {"none": 0.0, "host": 0.0, "disk": 0.0}
    if plan.synchronization is not None and plan.synchronization.offload == "host":
        elsewhere["host"] += outer
        outer = 0.0
    elsewhere[plan.offload_parameters] += parameters
    if away and plan.device == "cuda":
        # Then the update runs on the host, where the shards' states are.
        here = "host" if plan.offload_optimizer == "none" else plan.offload_optimizer
        elsewhere[here] += state
        of_shards = 0.0 if accumulates else shards * master
        elsewhere["host"] += average + shards * master * trained_share
        accumulated, final = max(accumulated - of_shards, 0.0), final - of_shards
        made = max(made - behind * of_shards, 0.0)
        state = average = 0.0
    elif plan.offload_optimizer != "none":
        elsewhere[plan.offload_optimizer] += state
        state = min(state, state / max(shards, 1) * UPDATED_TOGETHER)
    return State(
        parameters=(0 if away else parameters) + gathered * compute,
        gathered=gathered * compute,
        buffers=buffers,
        optimizer=state + average + remainder * trained_share + outer + under_way,
        accumulated=accumulated * trained_share,
        last=waiting * compute * mine.trained_last,
        reducing=reducing * trained_share,
        made=made * trained_share,
        added=added * trained_share,
        final=final * trained_share,
        let_go=let_go,
        receiving=receiving * trained_share,
        late=late * mine.trained_first,
        late_buffer=late_buffer * trained_share,
        host=elsewhere["host"],
        disk=elsewhere["disk"],
    )


def _between_sites(plan: Plan) -> tuple[float, float]:
    """Return (stored, in flight) copies of a rank's trained parameters for exchanges between sites.

    Stored copies are the outer weights and momentum that all sites share; copies in flight exist between
    steps.
    """
    seldom = plan.synchronization
    if seldom is None:
        return 0.0, 0.0
    if not seldom.is_local:
        return 0.0, seldom.staleness + 1.0
    # Fragments that ranks wait for exist while gradients and activations do not.
    at_once = min(seldom.fragments, -(-seldom.overlap_steps * seldom.fragments // seldom.every))
    return 1.0 + (seldom.momentum > 0), at_once / seldom.fragments
