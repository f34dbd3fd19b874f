"""Parts of torch without a promise of stability, one module per area of torch.

`table` lists every private name of torch that wanma uses, with the versions that have it. No other room uses
one. `versions` holds the supported versions of torch, and the combinations that some of them break.
"""
