"""Blocks of one's own: layers, parameters, and parts that only some samples pass."""

from __future__ import annotations

from support.generated.feature import LINEAR, Feature, block

LAYERS: dict[str, Feature] = {
    # ------------------------------------------------------------ plain layers
    "linear": block(LINEAR, "x + self.linear(x).tanh()"),
    "bias_free": block("self.linear = nn.Linear(D, D, bias=False)", "x + self.linear(x).relu()"),
    "bilinear": block("self.bilinear = nn.Bilinear(D, D, D)", "x + 0.3 * self.bilinear(x, x.flip(1))"),
    "layer_norm": block("self.norm = nn.LayerNorm(D)", "x + self.norm(x)"),
    "layer_norm_over_two": block("self.norm = nn.LayerNorm((T, D))", "x + self.norm(x)"),
    "rms_norm": block("self.norm = nn.RMSNorm(D)", "x + self.norm(x)"),
    "group_norm": block("self.norm = nn.GroupNorm(2, D)", "x + self.norm(x.transpose(1, 2)).transpose(1, 2)"),
    "instance_norm": block(
        "self.norm = nn.InstanceNorm1d(D, affine=True)",
        "x + self.norm(x.transpose(1, 2)).transpose(1, 2)",
    ),
    "convolution": block(
        "self.conv = nn.Conv1d(D, D, 3, padding=1)", "x + self.conv(x.transpose(1, 2)).transpose(1, 2).relu()"
    ),
    "depthwise": block(
        "self.conv = nn.Conv1d(D, D, 3, padding=1, groups=D)",
        "x + self.conv(x.transpose(1, 2)).transpose(1, 2)",
    ),
    "transposed_convolution": block(
        "self.conv = nn.ConvTranspose1d(D, D, 3, padding=1)",
        "x + self.conv(x.transpose(1, 2)).transpose(1, 2).tanh()",
    ),
    "gru": block("self.gru = nn.GRU(D, D, batch_first=True)", "x + self.gru(x)[0]"),
    "lstm": block(
        "self.lstm = nn.LSTM(D, D // 2, bidirectional=True, batch_first=True)", "x + self.lstm(x)[0]"
    ),
    "gru_cell": block(
        "self.cell = nn.GRUCell(D, D)\nself.start = nn.Parameter(torch.zeros(D))",
        """state = self.start.expand(len(x), D)
states = []
for position in range(T):
    state = self.cell(x[:, position], state)
    states.append(state)
x + torch.stack(states, 1)""",
    ),
    "attention": block(
        "self.attention = nn.MultiheadAttention(D, 2, batch_first=True)",
        "x + self.attention(x, x, x, need_weights=False)[0]",
    ),
    "encoder_layer": block(
        "self.layer = nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True, norm_first=True)",
        "self.layer(x)",
    ),
    "embedding": block(
        "self.table = nn.Embedding(5, D)", "x + self.table((x[..., 0] * 2).long().clamp(-2, 2) + 2)"
    ),
    "embedding_bag": block(
        "self.table = nn.EmbeddingBag(5, D, mode='mean')",
        "x + self.table((x[..., 0] * 2).long().clamp(-2, 2) + 2).unsqueeze(1)",
    ),
    "padded_embedding": block(
        "self.table = nn.Embedding(5, D, padding_idx=2)",
        "x + self.table((x[..., 0] * 2).long().clamp(-2, 2) + 2)",
    ),
    "in_place_relu": block(LINEAR + "\nself.relu = nn.ReLU(inplace=True)", "self.linear(self.relu(x)) + 1"),
    "sequential": block(
        "self.inner = nn.Sequential(nn.Linear(D, 8), nn.GELU(), nn.Sequential(nn.Linear(8, D)))",
        "x + self.inner(x)",
    ),
    "module_dict": block(
        "self.parts = nn.ModuleDict({'up': nn.Linear(D, 8), 'down': nn.Linear(8, D)})",
        "x + self.parts['down'](self.parts['up'](x).relu())",
    ),
    "inner_blocks": block(
        "self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))",
        """for layer in self.layers:
    x = x + layer(x).tanh()
x""",
    ),
    # ------------------------------------------------------------ parameters
    "number": block("self.scale = nn.Parameter(torch.tensor(0.7))", "x * self.scale"),
    "number_in_norm": block(
        "self.norm = nn.LayerNorm(D)\nself.scale = nn.Parameter(torch.tensor(0.7))",
        "x + self.norm(x) * self.scale",
    ),
    "vector": block("self.bias = nn.Parameter(torch.linspace(-1, 1, D))", "(x + self.bias).tanh()"),
    "bias_of_three_dims": block("self.bias = nn.Parameter(torch.zeros(1, T, D))", "x + self.bias"),
    "empty_parameter": block(
        LINEAR + "\nself.empty = nn.Parameter(torch.empty(0))", "x + self.linear(x).tanh() + self.empty.sum()"
    ),
    "transposed_parameter": block(
        "self.matrix = nn.Parameter(torch.randn(D, D).t() * 0.4)", "x + (x @ self.matrix).tanh()"
    ),
    "parameter_list": block(
        "self.matrices = nn.ParameterList([torch.randn(D, D) * 0.4 for _ in range(2)])",
        "x + (x @ self.matrices[0]).tanh() @ self.matrices[1]",
    ),
    "parameter_dict": block(
        "self.matrices = nn.ParameterDict({'a': torch.randn(D, D) * 0.4, 'b': torch.zeros(D)})",
        "x + (x @ self.matrices['a'] + self.matrices['b']).tanh()",
    ),
    "unused_parameter": block(
        LINEAR + "\nself.unused = nn.Parameter(torch.ones(D, D))", "x + self.linear(x)"
    ),
    "unused_module": block(LINEAR + "\nself.unused = nn.Linear(D, D)", "x + self.linear(x).tanh()"),
    "frozen_module": block(
        LINEAR + "\nself.frozen = nn.Linear(D, D).requires_grad_(False)",
        "x + self.linear(self.frozen(x)).tanh()",
    ),
    "frozen_weight": block(
        LINEAR + "\nself.linear.weight.requires_grad_(False)", "x + self.linear(x).tanh()"
    ),
    "tied_within": block(
        LINEAR + "\nself.other = nn.Linear(D, D)\nself.other.weight = self.linear.weight",
        "x + self.other(self.linear(x).tanh())",
    ),
    "tied_transposed": block(LINEAR, "x + F.linear(self.linear(x).tanh(), self.linear.weight.t())"),
    "used_twice": block(LINEAR, "x + self.linear(self.linear(x).tanh())"),
    "two_names": block(LINEAR + "\nself.other = self.linear", "x + self.other(self.linear(x).tanh())"),
    "one_storage": block(
        LINEAR + "\nself.other = nn.Linear(D, D)\nself.other.weight = nn.Parameter(self.linear.weight.data)",
        "x + self.other(self.linear(x).tanh())",
    ),
    "view_of_storage": block(
        "both = torch.randn(2, D, D) * 0.4\nself.a, self.b = nn.Parameter(both[0]), nn.Parameter(both[1])",
        "x + (x @ self.a).tanh() @ self.b",
    ),
    "double_parameter": block(
        "self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D, dtype=torch.float64))",
        "(x * self.scale).to(x.dtype)",
    ),
    "complex_parameter": block(
        "self.filter = nn.Parameter(torch.ones(3, D, dtype=torch.complex64))",
        "x + torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=T, dim=1).to(x.dtype).tanh()",
    ),
    "half_buffer": block(
        LINEAR + "\nself.register_buffer('mask', torch.ones(D, dtype=torch.bfloat16) / 2)",
        "x + self.linear(x) * self.mask.to(x.dtype)",
    ),
    "lazy_linear": block("self.linear = nn.LazyLinear(D)", "x + self.linear(x).tanh()"),
    "weight_norm": block(
        "self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", "x + self.linear(x).tanh()"
    ),
    "orthogonal": block(
        "self.linear = nn.utils.parametrizations.orthogonal(nn.Linear(D, D))", "x + self.linear(x).tanh()"
    ),
    "old_weight_norm": block(
        "self.linear = nn.utils.weight_norm(nn.Linear(D, D))", "x + self.linear(x).tanh()"
    ),
    "spectral_norm": block(
        "self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))",
        "x + self.linear(x).tanh()",
        whole_batch=True,
    ),
    "functional_call": block(
        LINEAR,
        """weights = {name: value * 0.9 for name, value in self.linear.named_parameters()}
x + torch.func.functional_call(self.linear, weights, x).tanh()""",
    ),
    "own_weights_in_forward": block(
        LINEAR, "x + self.linear(x).tanh() * (1 + 0.1 * sum(p.square().sum() for p in self.parameters()))"
    ),
    # ------------------------------------------------------------ parts of the batch
    "experts": block(
        "self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))",
        """choice = (x[:, 0, 0] > 0.8).long() + (x[:, 0, 0] > 0).long()
y = torch.zeros_like(x)
for number, expert in enumerate(self.experts):
    rows = (choice == number).nonzero().squeeze(1)
    if len(rows):
        y = y.index_add(0, rows, expert(x[rows]))
x + y.tanh()""",
        parts=True,
    ),
    "unlike_experts": block(
        "self.small = nn.Linear(D, D)\n"
        "self.large = nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, D))",
        """high = x[:, 0, 0] > 0
y = x.clone()
if high.any():
    y[high] = x[high] + self.large(x[high])
if not high.all():
    y[~high] = x[~high] + self.small(x[~high])
y""",
        parts=True,
    ),
    "seldom_used": block(
        LINEAR + "\nself.rare = nn.Linear(D, D)\nself.shift = nn.Parameter(torch.zeros(D))",
        """rare = x[:, 0, 0] > 1.3
y = x + self.linear(x).tanh()
if rare.any():
    y = torch.where(rare[:, None, None], y + self.rare(x) + self.shift, y)
y""",
        parts=True,
    ),
    "skipped_layer": block(
        "self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
        """for layer in self.layers:
    kept = x[:, 0, 1] > 0.3
    if kept.any():
        x = torch.where(kept[:, None, None], x + layer(x).tanh(), x)
x""",
        parts=True,
    ),
}
