"""Job files that tests of parameter servers train, each up to the keys of its last section, [train]."""

DLRM = """\
[model]
family = "recommender"
kind = "dlrm"
[model.recommender]
embedding = 8
[data]
path = "synthetic:100x150x4000"
[data.interactions]
target = "click"
positive_from = 4
[train]
learning_rate = 1e-2
"""
GPT = """\
[model]
family = "decoder"
layers = 2
hidden = 32
heads = 2
[data]
text = ["corpus"]
sequence_length = 32
cache = "cache"
[train]
steps = 6
learning_rate = 1e-2
optimizer = "sgd"  # AdamW makes rounding of gradients near zero as large as any other
"""
ASYNCHRONOUS = ("servers.mode=asynchronous", 'parallel.allow=["staleness"]')
"""Overrides of a job whose workers do not wait for each other."""
