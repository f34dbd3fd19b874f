"""Jobs that are wrong, each with the words that its one error has to hold.

Every one is refused by `wanma train --dry-run`. `BASE` is right: what is wrong is in the overrides.
"""

from __future__ import annotations

from typing import NamedTuple

BASE = {
    "text": """\
[model]
family = "decoder"
layers = 2
hidden = 32
heads = 2

[data]
text = ["words.txt"]
sequence_length = 32

[train]
steps = 20
global_batch = 4
""",
    "own": """\
[model]
factory = "own_code:net"

[data]
factory = "own_code:data"

[train]
steps = 4
global_batch = 4
""",
    "images": """\
[model]
family = "convnet"

[data]
images = "images.npz"

[train]
steps = 4
global_batch = 4
""",
    "numbers": """\
[model]
factory = "torch.nn:Linear"
arguments = { in_features = 2, out_features = 1 }

[data]
path = "numbers.csv"

[data.columns]
features = ["a", "b"]
target = "price"

[train]
steps = 4
global_batch = 4
""",
}
"""Job files by name."""

OWN_CODE = '''\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, 3)

    def forward(self, x):
        return self.layer(x)


class Looks(Net):
    """Looks at values in its forward."""

    def forward(self, x):
        return self.layer(x) if float(x.sum()) > -1e9 else x


class Fails(Net):
    def forward(self, x):
        return self.layer(x)[:, 7]


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(3)

    def forward(self, x):
        return self.layer(x)


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class TwoOutputs(Net):
    def forward(self, x):
        return {"first": self.layer(x), "second": self.layer(x)}


class Table(Net):
    """Holds a matrix by itself, whose role nobody can see."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, 4))

    def forward(self, x):
        return self.layer(x @ self.table)


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Samples:
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 16

    def __getitem__(self, number):
        return self.make(number)


class Endless:
    def __iter__(self):
        return iter([])


def net(width=4):
    return Net(width)


def no_model():
    return 5


def model_class():
    return Net


def nothing():
    return None


def raises():
    raise RuntimeError("boom")


def empty():
    return nn.Identity()


def of(make):
    return lambda: Samples(make)


x = torch.ones(4)
data = of(lambda number: (x, number % 3))
float_targets = of(lambda number: (x, 0.5))
bool_targets = of(lambda number: (x, True))
text_targets = of(lambda number: (x, "cat"))
out_of_range = of(lambda number: (x, 7))
negative_class = of(lambda number: (x, -3))
without_target = of(lambda number: {"x": x})
only_inputs = of(lambda number: x)
wrong_width = of(lambda number: (torch.ones(5), 1))
integers = of(lambda number: (torch.ones(4, dtype=torch.int64), 1))
doubles = of(lambda number: (x.double(), 1))
three_inputs = of(lambda number: (x, x, x, 1))
no_tuple = of(lambda number: 3)
targets_of_another_shape = of(lambda number: (x, torch.zeros(5, dtype=torch.int64)))
unknown_key = of(lambda number: {"x": x, "colour": x, "target": 1})
nones = of(lambda number: None)
strings = of(lambda number: ("a", 1))


def ragged():
    return Samples(lambda number: (torch.ones(4 + number), 1))


def missing_sample():
    def make(number):
        raise KeyError(f"sample {number} is gone")

    return Samples(make)


def endless():
    return Endless()


def no_samples():
    return []


def fails_to_open():
    raise FileNotFoundError("no such file: /data/train.bin")


def needs_an_argument(path):
    return data()


def loss(output, targets):
    return torch.nn.functional.cross_entropy(output, targets, reduction="none")


def mean_loss(output, targets):
    return torch.nn.functional.cross_entropy(output, targets)


def loss_of_nothing():
    return 0


def loss_of_text(output, targets):
    return "low"


def failing_loss(output, targets):
    return output.no_such_attribute


class TrainedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


trained_loss = TrainedLoss()
value = 3
'''
"""A module of a user's own, with what is right and what is not."""


class Wrong(NamedTuple):
    """One wrong job."""

    base: str
    overrides: tuple[str, ...]
    says: str


def wrong(base: str, says: str, *overrides: str) -> Wrong:
    return Wrong(base, overrides, says)


NAMES = [
    wrong("text", "must be the name of one folder", f"observe.name={name}")
    for name in ("..", ".", "../../evil", "a/b", "/abs", "a/", "/")
] + [
    wrong("text", "or contain control characters", "observe.name=a\tb"),
    wrong("text", "or contain control characters", "observe.name=a\x7fb"),
    wrong("text", "NUL", "observe.runs=a\0b"),
    wrong("text", "NUL", 'data.text=["a\0b"]'),
    wrong("text", "like an option of a command", "observe.name=-rf"),
    wrong("text", "at most 200 bytes", f"observe.name={'n' * 201}"),
    wrong("text", "at most 200 bytes", f"observe.name={'马' * 67}"),
    wrong("text", "must not begin or end with a blank", "observe.name=' a'"),
    wrong("text", "is not a folder", "observe.runs=words.txt"),
    wrong("text", "is not a folder", "observe.runs=words.txt/runs"),
]

NUMBERS = [
    wrong("text", "train.steps", f"train.steps={value}")
    for value in ("1e26", "1" + "0" * 26, "0", "-1", "2.5", "true", "inf", "nan", "'300'", "0x", "[]")
] + [
    wrong("text", f"{key} = ", f"{key}={value}")
    for key, value in (
        ("train.learning_rate", "1e300"),
        ("train.learning_rate", "0"),
        ("train.learning_rate", "inf"),
        ("train.learning_rate", "nan"),
        ("train.weight_decay", "1e300"),
        ("train.weight_decay", "-0.1"),
        ("train.epsilon", "1e300"),
        ("train.epsilon", "0"),
        ("train.gradient_clip", "1e300"),
        ("train.momentum", "1"),
        ("train.momentum", "-0.5"),
        ("train.loss_scale", "1e300"),
        ("train.final_learning_rate_share", "2"),
        ("train.weight_average", "1"),
        ("train.seed", "-1"),
        ("train.seed", str(2**64)),
        ("train.global_batch", "0"),
        ("train.global_batch", "1e9"),
        ("train.validation_samples", "1" + "0" * 15),
        ("train.spike_deviations", "0"),
        ("train.deterministic", "1"),
        ("train.deterministic", "yes"),
        ("train.optimizer", "adam"),
        ("train.schedule", "cosin"),
        ("train.precision", "fp8"),
        ("train.precision", "float32"),
        ("train.non_finite", "ignore"),
        ("cluster.hang_timeout_seconds", "1e-9"),
        ("cluster.hang_timeout_seconds", "1e300"),
        ("cluster.start_timeout_seconds", "0"),
        ("cluster.grace_seconds", "1e-12"),
        ("cluster.threads_per_rank", "100000"),
        ("cluster.threads_per_rank", "0"),
        ("cluster.max_restarts", "-1"),
        ("cluster.max_restarts", "1" + "0" * 12),
        ("cluster.nodes", "0"),
        ("cluster.nodes", "two"),
        ("cluster.device", "gpu"),
        ("cluster.engine", "cloud"),
        ("cluster.straggler_factor", "1"),
        ("cluster.requeue_exit_code", "256"),
        ("checkpoint.keep", "0"),
        ("checkpoint.keep", "1" + "0" * 20),
        ("checkpoint.every_steps", "-1"),
        ("checkpoint.in_memory_every_steps", "never"),
        ("checkpoint.in_memory_every_steps", "0"),
        ("checkpoint.partner", "perhaps"),
        ("data.prefetch", "100000000"),
        ("data.workers", "0"),
        ("data.workers", "1000000"),
        ("data.validation_fraction", "1"),
        ("data.validation_fraction", "-0.1"),
        ("data.sequence_length", "0"),
        ("parallel.tp", "0"),
        ("parallel.dp_replicate", "-2"),
        ("parallel.micro_batch", "0"),
        ("parallel.recompute_share", "0"),
        ("parallel.compression_share", "2"),
        ("parallel.schedule", "1f2b"),
        ("parallel.shard", "weights"),
        ("parallel.bucket_bytes", "0"),
        ("model.dropout", "1"),
        ("model.layers", "0"),
        ("model.layers", "2000"),
        ("model.lora_alpha", "0"),
        ("model.rope_theta", "-1"),
        ("observe.log_every_steps", "0"),
        ("observe.console", "loud"),
        ("observe.tensorboard", "yes"),
    )
]

KEYS = [
    wrong("text", "Did you mean 'train'", "trian.steps=3"),
    wrong("text", "Did you mean 'train.steps'", "train.step=3"),
    wrong("text", "Did you mean 'train.learning_rate'", "train.lr_rate=3", "train.learning_rat=3"),
    wrong("text", "unknown key 'train.epochs'", "train.epochs=3"),
    wrong("text", "belongs in", "learning_rate=0.1"),
    wrong("text", "is not an override", "train.steps"),
    wrong("text", "is not an override", "=3"),
    wrong("text", "is not an override", "train..steps=3"),
    wrong("text", "must be a table", "train=3"),
    wrong("text", 'or "auto"', "parallel=none"),
    wrong("text", "exactly one of", "model.preset=gpt-10m"),
    wrong("text", "exactly one of", "model.family="),
    wrong("text", "only one of", "data.images=images.npz"),
    wrong("text", "betas must be at least 0", "train.betas=[0.9,1.5]"),
    wrong("text", "train.betas = [0.9]", "train.betas=[0.9]"),
    wrong("text", "train.betas", "train.betas=[0.9,0.95,0.99]"),
    wrong("text", "train.betas", "train.betas=0.9"),
    wrong("text", "and finite", "train.betas=[inf,0.9]"),
    wrong("text", "must rise", "train.batch_ramp=[[5,8],[5,4]]"),
    wrong("text", "batch_ramp needs steps", "train.batch_ramp=[[5,0]]"),
    wrong("text", "a list of whole numbers > 0", "parallel.batch_shares=[0]"),
    wrong("text", "2 numbers for 1 data rank", "parallel.batch_shares=[1,2]"),
    wrong("text", "HOST:PORT", "cluster.rendezvous=here"),
    wrong("text", "HOST:PORT", "cluster.rendezvous=host:0"),
    wrong("text", "HOST:PORT", "cluster.rendezvous=host:70000"),
    wrong("text", "node_rank must be 0", "cluster.nodes=2", "cluster.node_rank=2"),
    wrong("text", "nodes as a range must rise", "cluster.nodes=8..2"),
    wrong(
        "text",
        "names of sources must be unique",
        "data.text=",
        "data.sources=[{name='a',text='words.txt'},{name='a',text='b'}]",
    ),
    wrong("text", "credentials", "checkpoint.upload=s3://key:secret@bucket/run"),
]

NO_MODEL = ("model.family=", "model.layers=", "model.hidden=", "model.heads=")
"""Overrides of the job `text` that leave out its model."""
MODELS = [
    wrong("text", "Did you mean 'gpt-1m'", "model.preset=gpt-11m", *NO_MODEL),
    wrong("text", "not divisible by model.heads", "model.heads=3"),
    wrong("text", "not divisible by model.kv_heads", "model.kv_heads=3"),
    wrong("text", "not divisible by model.heads", "model.hidden=33"),
    wrong("text", "smaller than the tokenizer", "model.vocabulary=10"),
    wrong("text", "exceeds the 2 experts that", "model.experts=2", "model.experts_per_token=4"),
    wrong("text", "experts are SwiGLU networks", "model.experts=2", "model.activation_function=gelu"),
    wrong("text", "one of swiglu, gelu", "model.activation_function=relu"),
    wrong("images", "does not apply to a vision model", "model.activation_function=gelu"),
    wrong("own", "does not apply to model.factory", "model.activation_function=gelu"),
    wrong("text", "not smaller than the dimensions", "model.lora_rank=1000"),
    wrong("text", "does not match any linear layer", "model.lora_rank=2", 'model.lora_targets=["zzz"]'),
    wrong("text", "does not apply to a decoder", "model.depth=18"),
    wrong("text", "does not apply to a decoder", "model.classes=10"),
    wrong("text", "does not apply to a decoder", "model.image_size=32"),
    wrong("text", "model.arguments", "model.arguments={width=3}"),
    wrong("text", "model.layers", "model.layers="),
    wrong("text", "does not apply to model.factory", "model.family=", "model.factory=own_code:net"),
    wrong("images", "does not apply", "model.layers=3"),
    wrong("images", "needs tokens, but the data are images", "model.family=", "model.preset=gpt-1m"),
    wrong("text", "needs images, but the data are tokens", "model.preset=resnet-18", *NO_MODEL),
    wrong("text", "is neither a file nor a folder", "model.huggingface=nowhere", *NO_MODEL),
]

DATA = [
    wrong("text", "no file matches", 'data.text=["/nowhere/*.txt"]'),
    wrong("text", "does not exist", 'data.text=["/nowhere"]'),
    wrong("text", "data.text", 'data.text=[""]'),
    wrong("text", "data.tokenizer", "data.tokenizer=/nowhere.json"),
    wrong("text", "data.tokenizer", "data.tokenizer=words.txt"),
    wrong("text", "too long for a text", "data.sequence_length=1000000000"),
    wrong("text", "data.cache", "data.cache=words.txt"),
    wrong("text", "data.text", 'data.text=["images.npz"]'),
    wrong("text", "data.text", 'data.text=["rows.jsonl"]'),
    wrong("text", "data.text", 'data.text=["empty.txt"]'),
    wrong("text", "Protocol not known", 'data.text=["zzz://bucket/a.txt"]'),
    wrong("images", "does not exist", "data.images=/nowhere"),
    wrong("images", "data.images", "data.images=words.txt"),
    wrong("own", "neither a map-style dataset", "data.factory=own_code:no_model"),
    wrong("own", "NoneType has no length", "data.factory=own_code:nothing"),
    wrong("own", "data", "data.factory=own_code:endless"),
    wrong("own", "is empty", "data.factory=own_code:no_samples"),
    wrong("own", "has no 'zzz'", "data.factory=own_code:zzz"),
    wrong("own", "module 'zzz' does not exist", "data.factory=zzz:data"),
    wrong("own", "is not an import path", "data.factory=own_code"),
    wrong("own", "is int, not a function", "data.factory=own_code:value"),
    wrong("own", "no such file: /data/train.bin", "data.factory=own_code:fails_to_open"),
    wrong("own", "data.arguments", "data.factory=own_code:needs_an_argument"),
    wrong("own", "data.arguments", "data.arguments={zz=3}"),
    wrong(
        "own", "cross entropy, the default loss, needs integer classes", "data.factory=own_code:float_targets"
    ),
    wrong(
        "own", "cross entropy, the default loss, needs integer classes", "data.factory=own_code:bool_targets"
    ),
    wrong("own", "a target is class 7", "data.factory=own_code:out_of_range"),
    wrong("own", "a target is class -3", "data.factory=own_code:negative_class"),
    wrong("own", "no target", "data.factory=own_code:without_target"),
    wrong("own", "sample", "data.factory=own_code:only_inputs"),
    wrong("own", "sample", "data.factory=own_code:no_tuple"),
    wrong("own", "sample", "data.factory=own_code:nones"),
    wrong("own", "sample", "data.factory=own_code:strings"),
    wrong("own", "sample", "data.factory=own_code:text_targets"),
    wrong("own", "Linear(in_features=4", "data.factory=own_code:wrong_width"),
    wrong("own", "int64 [4, 4]", "data.factory=own_code:integers"),
    wrong("own", "float64", "data.factory=own_code:doubles"),
    wrong("own", "the model failed on samples", "data.factory=own_code:three_inputs"),
    wrong("own", "colour", "data.factory=own_code:unknown_key"),
    wrong("own", "for targets of shape", "data.factory=own_code:targets_of_another_shape"),
    wrong("own", "cannot be joined into a batch", "data.factory=own_code:ragged"),
    wrong("own", "sample", "data.factory=own_code:missing_sample"),
]

OWN_MODELS = [
    wrong("own", says, f"model.factory=own_code:{name}")
    for name, says in (
        ("no_model", "returned int, not an nn.Module"),
        ("nothing", "returned NoneType, not an nn.Module"),
        ("model_class", "returned type, not an nn.Module"),
        ("x", "not a function or class"),
        ("value", "not a function or class"),
        ("raises", "boom"),
        ("empty", "has no parameters"),
        ("zzz", "has no 'zzz'"),
        ("Lazy", "has no shape before the first forward"),
        ("Complex", "is complex"),
        ("Fails", "the model failed on samples"),
        ("TwoOutputs", "logits"),
        ("Frozen", "nothing to train"),
    )
] + [
    wrong("own", "is not an import path", "model.factory=own_code"),
    wrong("own", "module 'zzz' does not exist", "model.factory=zzz:net"),
    wrong("own", "unexpected keyword argument 'zz'", "model.arguments={zz=3}"),
    wrong("own", "own_code:net' failed", "model.arguments={width='a'}"),
    wrong("own", "the model failed on samples", "model.arguments={width=5}"),
    wrong("numbers", "validation has no such metric", "checkpoint.best_metric=accuracy"),
    wrong("numbers", "model.loss", "model.arguments={in_features=2, out_features=3}"),
    wrong("own", "Muon", "model.factory=own_code:Table", "train.optimizer=muon"),
    wrong("own", "has no 'zzz'", "model.loss=own_code:zzz"),
    wrong("own", "cannot be called", "model.loss=own_code:value"),
    wrong("own", "is the class TrainedLoss", "model.loss=own_code:TrainedLoss"),
    wrong("own", "has trainable parameters", "model.loss=own_code:trained_loss"),
    wrong("own", "takes 0 positional arguments", "model.loss=own_code:loss_of_nothing"),
    wrong("own", "no_such_attribute", "model.loss=own_code:failing_loss"),
    wrong("own", "loss", "model.loss=own_code:loss_of_text"),
    wrong("own", "unreduced losses", "model.loss=own_code:mean_loss"),
]

TRAINING = [
    wrong(base, says, override)
    for base in ("text", "own")
    for says, override in (
        ("matches no parameter", "train.parameter_groups=[{match='zzz*'}]"),
        ("freezes every parameter", "train.parameter_groups=[{match='*',frozen=true}]"),
        ("matches no parameter", "parallel.compression_groups=[{match='zzz*',compression='int8'}]"),
        ("there is no such folder", "checkpoint.start_from=/nowhere"),
        ("is not complete", "checkpoint.start_from=folder"),
        ("there is no such folder", "checkpoint.start_from=words.txt"),
        ("only PEFT adapters", "checkpoint.start_from=adapters"),
        ("this node has no interface 'eth77'", "cluster.network_interface=eth77"),
        ("the storage protocol 'zzz' is not supported", "checkpoint.upload=zzz://x"),
        ("fp8", "train.fp8=true"),
        ("no NVIDIA GPU", "cluster.device=cuda"),
        ("there is no cluster file", "cluster.file=/nowhere"),
        ("not in the device catalogue", "cluster.file=8x8 Z100"),
        ("less than one sample each", "parallel.dp_replicate=100"),
        ("not a multiple of cluster.nodes = 2", "cluster.nodes=2"),
        ("no gradient is 'topk'", "parallel.compression_share=0.5"),
    )
]

STOPS = ("train.stop_patience=2", "train.validate_every_steps=2")
"""Overrides of a job that stops early."""

LAYOUTS = [
    wrong("text", says, *overrides)
    for says, *overrides in (
        ("is not a multiple of parallel.tp = 3", "parallel.tp=3"),
        ("heads", "parallel.tp=4", "data.sequence_length=32"),
        ("parallel.cp", "parallel.cp=3"),
        ("parallel.pp", "parallel.pp=5"),
        ("parallel.stage_cuts", "parallel.pp=2", "parallel.stage_cuts=[5]"),
        ("parallel.stage_cuts", "parallel.pp=2", "parallel.stage_cuts=[1,1]"),
        ("cannot split 1 data", "model.experts=4", "parallel.ep=3"),
        ("cannot split 1 data", "parallel.ep=2"),
        ("adafactor", "train.optimizer=adafactor", "parallel.dp_shard=2"),
        ("parallel.sites", "parallel.synchronize=diloco", "parallel.dp_replicate=2", "parallel.sites=3"),
        ("parallel.outer_learning_rate", "parallel.outer_learning_rate=0.5"),
        ("parallel.staleness", "parallel.staleness=2"),
    )
] + [wrong("own", "does not declare", f"parallel.{axis}=2") for axis in ("tp", "cp")]

FIRST_WEEK = [
    wrong("own", says, *overrides)
    for says, *overrides in (
        ("module 'nowhere' does not exist", "train.metrics={near='nowhere:f'}"),
        ("has no 'zzz'", "train.metrics={near='own_code:zzz'}"),
        ("is not a function", "train.metrics={near='own_code:value'}"),
        ("is not a valid metric name", "train.metrics={loss='own_code:net'}"),
        ("cannot be summed over ranks", "train.metrics={near='own_code:mean_loss'}"),
        ("metric 'near' failed", "train.metrics={near='own_code:failing_loss'}"),
        ("cannot be summed over ranks", "train.metrics={near='own_code:loss_of_text'}"),
        ("needs validations", "train.stop_patience=2"),
        ("validation has no such metric", *STOPS, "train.stop_metric=zzz"),
        ("no validation part", *STOPS, "data.validation_fraction=0"),
        ("must be one of min, max", *STOPS, "train.stop_mode=up"),
        ("has no 'Zzz'", "train.optimizer_factory=torch.optim:Zzz"),
        ("LBFGS", "train.optimizer_factory=torch.optim:LBFGS"),
        ("cannot be built", "train.optimizer_factory=torch.optim:RAdam", "train.optimizer_arguments={zzz=1}"),
        ("cannot be built", "train.optimizer_factory=own_code:Table"),
        ("only one of optimizer", "train.optimizer_factory=torch.optim:RAdam", "train.optimizer=sgd"),
        ("only one of schedule", "train.schedule_factory=math:sqrt", "train.schedule=linear"),
        ("full tensors", "train.optimizer_factory=torch.optim:Adafactor", "parallel.dp_shard=2"),
        ("the schedule failed at step 0", "train.schedule_factory=math:log"),
        ("schedule is a", "train.schedule_factory=math:pi"),
        ("is not a wanma.Callback", "observe.callbacks=['own_code:value']"),
        ("has no 'zzz'", "observe.callbacks=['own_code:zzz']"),
    )
]

ALL = [*NAMES, *NUMBERS, *KEYS, *MODELS, *DATA, *OWN_MODELS, *TRAINING, *LAYOUTS, *FIRST_WEEK]
