"""Parameters, gradients and optimizer state of one rank: what is there all the time, and what a step adds.

Sharded state follows Rajbhandari et al. 2020, section 5; what FSDP2 holds beside it is from its own
behaviour (one unit of communication per block, another for the rest), which tests measure. Programs that
keep whole copies follow Megatron-LM: 2 bytes of weights, 2 or 4 of gradients, and 12 of state per parameter,
which a distributed optimizer shares among the data ranks.
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
    """Of one pipeline rank, on one rank of `tp`."""

    blocks: float
    """Those of its blocks, but for routed experts."""
    experts: float
    """Of routed experts, on one rank of `ep`."""
    ends: float
    """Of what is no block: embedding, head."""
    block: float
    """Of its largest block, with the experts that are here."""
    shapes: float = 0.0
    """Of its products' matrices, one of every shape."""
    first: float = 0.0
    """Of what comes before the blocks, such as an embedding: backward comes to it last."""
    embedding: float = 0.0
    """Of that, what is one tensor."""
    routed: float = 0.0
    """Of routed experts, those of its largest block."""
    tensors: tuple[tuple[float, float], ...] = ()
    """(elements, how many) of the large ones that are known one by one; the others may be of any size."""
    trained_share: float = 1.0
    """Of all of them, those that are trained."""
    trained_blocks: float = 1.0
    """Likewise of blocks."""
    trained_first: float = 1.0
    """Likewise of what comes before the blocks."""
    trained_last: float = 1.0
    """Likewise of what comes after them."""

    @property
    def trained_ends(self) -> float:
        """Of what is no block, the share that is trained."""
        last = self.ends - self.first
        return (self.first * self.trained_first + last * self.trained_last) / self.ends if self.ends else 1.0

    @property
    def held(self) -> float:
        return self.blocks + self.experts + self.ends

    def smaller(self, elements: float) -> float:
        """In tensors of fewer elements, as far as anybody knows."""
        return max(self.held - sum(size * count for size, count in self.tensors if size >= elements), 0.0)


class State(NamedTuple):
    """Bytes of one rank."""

    parameters: float
    """With what is gathered of them."""
    gathered: float
    """Of them, what is gathered for a step."""
    buffers: float
    """Memory that ranks share to exchange tensors in, this one's part: once it was used it stays."""
    optimizer: float
    """With an averaged copy of the weights, what compressed gradients lost so far, and what sites keep."""
    accumulated: float
    """Gradients that are there from one micro-batch to the next."""
    last: float
    """Gradients of what comes after the blocks, as one backward makes them: first of all."""
    reducing: float
    """What is there beside them while backward hands a block's gradients over."""
    made: float
    """Gradients of what backward has gone through when it comes to its last block, with what reduces them."""
    added: float
    """Beside them, the last of a micro-batch's gradients, before it is added to the sum of those before."""
    final: float
    """All gradients, as backward ends, with what reduces them."""
    let_go: float
    """Of what is gathered, what is no longer there then."""
    receiving: float
    """Beside `final`, parts that come from others."""
    late: float
    """Of one tensor, the gradient that backward makes last."""
    late_buffer: float
    """What the last unit's gradients are reduced in, but for what has room where others were let go of."""
    host: float
    disk: float


def weight_bytes(workload: Workload, plan: Plan, *, rounds_frozen: bool) -> float:
    """Bytes of a whole model's weights as they are held and saved."""
    master = 8.0 if plan.precision == "fp64" else 4.0
    trained = workload.parameters * workload.trained_share
    frozen = _frozen_bytes(plan, BYTES[plan.precision], master) if rounds_frozen else master
    return trained * master + (workload.parameters - trained) * frozen


def _frozen_bytes(plan: Plan, compute: float, master: float) -> float:
    """Bytes of one element of a frozen weight. What is gathered in fp8 is cast from fp32."""
    return master if plan.fp8 and plan.shard == "parameters" and plan.tp == 1 else compute


COMPRESSED_TOGETHER_BYTES = 1 << 24
"""Of gradients that are made smaller in one go: `collectives.compression`, which a test compares."""
_COPIES = 3
"""Of those, what making them smaller and numbers again takes beside them, about."""

STATE_COPIES = {"adamw": (2, 2), "sgd": (1, 1), "plain sgd": (0, 0), "muon": (1, 2), "adafactor": (0, 0)}
"""Elements of state per parameter of blocks and of the rest: AdamW keeps two moments, SGD a momentum if any;
Muon keeps one for the blocks' matrices and leaves the rest to AdamW; Adafactor keeps a row and a column for
each matrix, which is next to nothing."""


def rule_of(train: TrainSection) -> str:
    """The key of `STATE_COPIES` for a job."""
    return "plain sgd" if train.optimizer == "sgd" and train.momentum == 0 else train.optimizer


def state_elements(workload: Workload, train: TrainSection) -> float:
    """Of the whole model's optimizer state."""
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
    """
    Args:
        optimizer: as of `rule_of`.
        micro_batches: of one step and rank, at most.
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


def _shards(
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
    master = 8 if plan.precision == "fp64" else 4
    compute = BYTES[plan.precision]
    # FSDP2 computes with a copy of the weights in compute precision beside the shards of the master's,
    # also where there is nobody to share with; but for what computes with the state itself, below. On a
    # GPU it gathers the next block while one computes.
    # In a pipeline blocks stay gathered from their backward on, and gradients whole to the step's end.
    around = 1 if plan.device == "cpu" else 2
    away = plan.offload_parameters != "nothing"
    by_block = (plan.shard == "parameters" or away) and plan.pp == 1
    gathered = mine.ends + around * mine.block if by_block else mine.held
    frozen = _frozen_bytes(plan, compute, master) if rounds_frozen else float(master)
    parameters = shards * (master * trained_share + frozen * (1 - trained_share))
    # Where a step has all weights whole, frozen ones that need no cast are not gathered. They are whole on
    # every rank, all but those that ranks have in common.
    copied = 1.0
    if rounds_frozen and frozen == compute and not (by_block or away):
        copied = trained_share
        if not has_common_weights:
            parameters = shards * master * trained_share + mine.held * frozen * (1 - trained_share)

    # Gradients of one unit are copied into one buffer to be reduced. Without reduction at every
    # micro-batch, whole gradients are accumulated in fp32 until the last.
    # On a CPU they are one unit where they are whole anyway (`parallel.shard`), and with one shard the
    # buffer becomes the gradient.
    whole_kind = plan.shard in ("nothing", "optimizer")
    one_unit = plan.device == "cpu" and whole_kind and not away
    unit = mine.held if one_unit else max(mine.ends, mine.block)
    # What is no block is one unit, whose gradients wait for the last of them, whole.
    waiting = mine.ends - mine.first
    behind = max(1 - (mine.first + mine.block) / mine.held, 0.0) if mine.held else 0.0
    accumulates = micro_batches > 1 and (plan.pp > 1 or whole_kind)
    # What a unit is gathered into and what its gradients are reduced in is memory that ranks share. What is
    # no block is gathered first, and stays there until the first block is; where this is larger, the next
    # one has no room in the place that the ends leave. Experts of which nobody has another part are not
    # exchanged there. Weights that ranks have in common are not gathered at all: in 16 bits there is one copy
    # of them beside the shards, in 32 these are it.
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
            if accumulated:  # their sum, before it is added to those of earlier micro-batches
                final += unit * master / plan.shard_ranks
    # Gloo's parts of a scattered sum come from all other ranks at once.
    receiving = 0.0
    if plan.device == "cpu" and not shards_share:
        receiving = unit * master * (1 - 1 / plan.shard_ranks)
    gathered *= copied
    # FSDP2 lets go of what it gathered before it reduces; but where that stays from one micro-batch to the
    # next, gradients are reduced beside it, unless they wait for the last.
    let_go = gathered * compute if by_block or accumulates or micro_batches == 1 else 0.0
    late, late_buffer = mine.embedding * compute, receiving
    if reduced and not (one_unit and let_go >= unit * reduced):
        late_buffer += unit * reduced
    if reduced and accumulated and not accumulates:
        late_buffer += unit * master / plan.shard_ranks
    if has_common_weights and compute != master:
        # Elsewhere the sum has room where what was gathered was let go of; in 32 bits where the shards were
        # before they became parts of what is common.
        late_buffer += unit * master / plan.shard_ranks

    added = 0.0
    if plan.computes_with_state:  # gradients are summed where backward has put them
        gathered = let_go = 0.0
        reducing = 0.0 if accumulates else waiting * master
        made = 0.0 if accumulates else mine.held * behind * master
        added = mine.first * master if accumulates else 0.0
        final, late, late_buffer = mine.held * master, mine.embedding * master, 0.0
        if plan.replicas > 1 and not plan.compressions:
            together = min(final, plan.bucket_bytes)
            if plan.hierarchical:  # what other ranks send of a bucket waits to be added up
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
    elsewhere = {"nothing": 0.0, "host": 0.0, "disk": 0.0}
    if plan.synchronization is not None and plan.synchronization.offload == "host":
        elsewhere["host"] += outer
        outer = 0.0
    elsewhere[plan.offload_parameters] += parameters
    if away and plan.device == "cuda":
        # Then the update runs on the host: what belongs to the shards is there.
        here = "host" if plan.offload_optimizer == "nothing" else plan.offload_optimizer
        elsewhere[here] += state
        of_shards = 0.0 if accumulates else shards * master
        elsewhere["host"] += average + shards * master * trained_share
        accumulated, final = max(accumulated - of_shards, 0.0), final - of_shards
        made = max(made - behind * of_shards, 0.0)
        state = average = 0.0
    elif plan.offload_optimizer != "nothing":
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
    """Of a rank's trained parameters, how many copies its site keeps of what all sites share, and how many
    are under way between steps."""
    seldom = plan.synchronization
    if seldom is None:
        return 0.0, 0.0
    if not seldom.is_local:
        return 0.0, seldom.staleness + 1.0
    # What is waited for is there when gradients and activations are not.
    at_once = min(seldom.fragments, -(-seldom.overlap_steps * seldom.fragments // seldom.every))
    return 1.0 + (seldom.momentum > 0), at_once / seldom.fragments
