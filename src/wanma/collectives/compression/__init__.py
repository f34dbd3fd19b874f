"""Sums of gradients over a process group in fewer bytes than the gradients have.

    rounding    bf16, and fp16 with a scale that cannot overflow
    blockwise   int8 with a scale for each block
    top_k       the largest share of each tensor's elements
    power_sgd   matrices as products of two thin ones
    whole       as they are: what a policy leaves out

Each method sums `Piece`s of a bucket in one of two forms: `all_reduce`, every rank gets the sums, and
`reduce_scatter`, each rank gets its shard of them. What a method loses it keeps in the rank's own error
memory and adds to the next gradient (error feedback: Seide et al. 2014; Stich et al. 2018): over the
ranks, the memories sum up to exactly what the exchanges so far have left out. Plain `torch.distributed`
calls, any backend.
"""
