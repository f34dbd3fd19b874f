"""Compressed sums of gradients over a process group, in fewer bytes than the gradients have.

    compression_traits      properties of each method that other rooms rely on
    half_precision_codecs   bf16, and fp16 with a scale that cannot overflow
    int8_codec              int8 with a scale for each block
    top_k                   the largest elements of each tensor
    power_sgd               matrices as products of two thin ones
    uncompressed            full precision, for tensors that a policy excludes

Each compressor sums `BucketTensor`s of a bucket in one of two forms: `all_reduce`, every rank gets the sums,
and `reduce_scatter`, each rank gets its shard of them. What compression loses a rank keeps as its own error
feedback and adds to the next gradient (Seide et al. 2014; Stich et al. 2018): over the ranks, it sums up to
exactly what all sums so far have left out. Plain `torch.distributed` calls, any backend.
"""
