"""Blocks of one's own that draw, count, hook, or change themselves."""

from __future__ import annotations

from support.generated.feature import LINEAR, Feature, block

HABITS: dict[str, Feature] = {
    "dropout": block(LINEAR + "\nself.drop = nn.Dropout(0.3)", "x + self.drop(self.linear(x).tanh())"),
    "dropout_twice": block(
        LINEAR + "\nself.drop = nn.Dropout(0.3)", "x + self.drop(self.linear(self.drop(x)).tanh())"
    ),
    "dropout_of_channels": block(
        LINEAR + "\nself.drop = nn.Dropout1d(0.3)",
        "x + self.drop(self.linear(x).tanh().transpose(1, 2)).transpose(1, 2)",
    ),
    "dropout_in_place": block(
        LINEAR + "\nself.drop = nn.Dropout(0.3, inplace=True)", "x + self.drop(self.linear(x).tanh())"
    ),
    "dropout_in_eval_mode": block(
        LINEAR + "\nself.drop = nn.Dropout(0.3).eval()", "x + self.drop(self.linear(x).tanh())"
    ),
    "alpha_dropout": block(
        LINEAR + "\nself.drop = nn.AlphaDropout(0.3)", "x + self.drop(self.linear(x).tanh())", draws=True
    ),
    "functional_dropout": block(
        LINEAR, "x + F.dropout(self.linear(x).tanh(), 0.3, self.training)", draws=True
    ),
    "noise": block(LINEAR, "x + self.linear(x).tanh() + 0.1 * torch.randn_like(x)", draws=True),
    "gumbel": block(LINEAR, "x + F.gumbel_softmax(self.linear(x), dim=-1)", draws=True),
    "noise_from_a_generator": block(
        LINEAR + "\nself.generator = torch.Generator().manual_seed(3)",
        "x + self.linear(x).tanh() + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)",
        draws=True,
    ),
    "noise_of_numpy": block(
        LINEAR,
        "x + self.linear(x).tanh() + 0.1 * torch.from_numpy(np.random.randn(*x.shape)).to(x.dtype)",
        draws=True,
    ),
    "noise_of_random": block(LINEAR, "x + self.linear(x).tanh() * random.random()", draws=True),
    "dropped_layer": block(
        LINEAR, "x + self.linear(x).tanh() if torch.rand(()) > 0.4 else x * 0.9", draws=True, parts=True
    ),
    "attention_with_dropout": block(
        "self.attention = nn.MultiheadAttention(D, 2, 0.3, batch_first=True)",
        "x + self.attention(x, x, x, need_weights=False)[0]",
        draws=True,
    ),
    # ------------------------------------------------------------ batch statistics
    "batch_norm": block(
        "self.norm = nn.BatchNorm1d(D)", "x + self.norm(x.transpose(1, 2)).transpose(1, 2)", layers=True
    ),
    "batch_norm_of_eval_mode": block(
        LINEAR + "\nself.norm = nn.BatchNorm1d(D).eval()",
        "x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)",
        layers=True,
    ),
    "frozen_batch_norm": block(
        "self.norm = nn.BatchNorm1d(D).requires_grad_(False)",
        "x + self.norm(x.transpose(1, 2)).transpose(1, 2)",
        layers=True,
    ),
    "batch_norm_with_a_hook": block(
        "self.norm = nn.BatchNorm1d(D)\nself.norm.register_forward_hook(lambda module, args, y: y * 1.5)",
        "x + self.norm(x.transpose(1, 2)).transpose(1, 2)",
        layers=True,
    ),
    "batch_norm_subclass": block(
        "self.norm = Doubled(D)",
        "x + self.norm(x.transpose(1, 2)).transpose(1, 2)",
        layers=True,
    ),
    "instance_norm_with_statistics": block(
        "self.norm = nn.InstanceNorm1d(D, track_running_stats=True)",
        "x + self.norm(x.transpose(1, 2)).transpose(1, 2)",
        whole_batch=True,
    ),
    "standardised_batch": block(
        LINEAR, "x + (x - x.mean(0)) / (x.std(0, correction=0) + 0.5) + self.linear(x)", whole_batch=True
    ),
    "mean_of_the_batch_kept": block(
        LINEAR + "\nself.register_buffer('mean', torch.zeros(D))",
        """if self.training:
    self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean), 0.1)
x + self.linear(x - self.mean).tanh()""",
        whole_batch=True,
    ),
    # ------------------------------------------------------------ buffers and state
    "buffer": block(
        LINEAR + "\nself.register_buffer('mask', torch.linspace(0, 1, D))", "x + self.linear(x) * self.mask"
    ),
    "buffer_not_saved": block(
        LINEAR + "\nself.register_buffer('mask', torch.linspace(0, 1, D), persistent=False)",
        "x + self.linear(x) * self.mask",
    ),
    "buffer_of_integers": block(
        LINEAR + "\nself.register_buffer('order', torch.arange(D).flip(0))",
        "x + self.linear(x)[..., self.order]",
    ),
    "plain_tensor": block(LINEAR + "\nself.mask = torch.linspace(0, 1, D)", "x + self.linear(x) * self.mask"),
    "counter": block(
        LINEAR + "\nself.register_buffer('calls', torch.zeros(()))",
        """self.calls += 1
x + self.linear(x) / self.calls""",
        whole_batch=True,
    ),
    "counter_of_samples": block(
        LINEAR + "\nself.register_buffer('seen', torch.zeros((), dtype=torch.int64))",
        """self.seen += len(x)
x + self.linear(x).tanh()""",
        whole_batch=True,
    ),
    "assigned_buffer": block(
        LINEAR + "\nself.register_buffer('norm', torch.zeros(()))",
        """self.norm = self.linear.weight.detach().norm()
x + self.linear(x) / (1 + self.norm)""",
    ),
    "counter_in_python": block(
        LINEAR + "\nself.calls = 0",
        """self.calls += 1
x + self.linear(x) / self.calls""",
        whole_batch=True,
    ),
    "extra_state": block(
        LINEAR + "\nself.name = 'me'",
        "x + self.linear(x).tanh()",
        "def get_extra_state(self):\n    return {'name': self.name}\n\n"
        "def set_extra_state(self, state):\n    self.name = state['name']",
    ),
    "kept_activation": block(
        LINEAR,
        """self.last = self.linear(x)
x + self.last.tanh()""",
    ),
    "own_saved_names": block(
        LINEAR,
        "x + self.linear(x).tanh()",
        "def _save_to_state_dict(self, destination, prefix, keep_vars):\n"
        "    super()._save_to_state_dict(destination, prefix, keep_vars)\n"
        "    destination[prefix + 'version'] = torch.ones(())\n\n"
        "def _load_from_state_dict(self, state, prefix, *rest):\n"
        "    state.pop(prefix + 'version', None)\n"
        "    super()._load_from_state_dict(state, prefix, *rest)",
    ),
    # ------------------------------------------------------------ weights changed in forward
    "clamped_weight": block(
        LINEAR,
        """with torch.no_grad():
    self.linear.weight.clamp_(-0.3, 0.3)
x + self.linear(x).tanh()""",
    ),
    "clamped_data": block(
        LINEAR,
        """self.linear.weight.data.clamp_(-0.3, 0.3)
x + self.linear(x).tanh()""",
    ),
    "assigned_data": block(
        LINEAR,
        """self.linear.weight.data = F.normalize(self.linear.weight.data, dim=1)
x + self.linear(x).tanh()""",
    ),
    "momentum_teacher": block(
        LINEAR + "\nself.teacher = nn.Linear(D, D).requires_grad_(False)",
        """with torch.no_grad():
    for slow, fast in zip(self.teacher.parameters(), self.linear.parameters()):
        slow.lerp_(fast, 0.1)
x + self.linear(x).tanh() + 0.5 * self.teacher(x)""",
        whole_batch=True,
    ),
    "frozen_in_forward": block(
        LINEAR + "\nself.register_buffer('calls', torch.zeros(()))",
        """self.calls += 1
self.linear.weight.requires_grad_(bool(self.calls < 2))
x + self.linear(x).tanh()""",
        whole_batch=True,
    ),
    "unfrozen_in_forward": block(
        LINEAR + "\nself.linear.requires_grad_(False)\nself.register_buffer('calls', torch.zeros(()))",
        """self.calls += 1
self.linear.requires_grad_(bool(self.calls > 1))
x + self.linear(x).tanh()""",
        whole_batch=True,
    ),
    # ------------------------------------------------------------ hooks
    "forward_hook": block(
        LINEAR + "\nself.linear.register_forward_hook(lambda module, args, y: y * 1.5)",
        "x + self.linear(x).tanh()",
    ),
    "forward_pre_hook": block(
        LINEAR + "\nself.linear.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))",
        "x + self.linear(x).tanh()",
    ),
    "backward_hook": block(
        LINEAR
        + "\nself.linear.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))",
        "x + self.linear(x).tanh()",
    ),
    "gradient_hook": block(
        LINEAR + "\nself.linear.weight.register_hook(lambda gradient: gradient.tril())",
        "x + self.linear(x).tanh()",
    ),
    "clipping_gradient_hook": block(
        LINEAR + "\nself.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))",
        "x + self.linear(x).tanh()",
    ),
    "accumulated_gradient_hook": block(
        LINEAR + "\nself.linear.weight.register_post_accumulate_grad_hook(keep_lower)",
        "x + self.linear(x).tanh()",
    ),
    "dropout_with_a_hook": block(
        LINEAR + "\nself.drop = nn.Dropout(0.3)\nself.drop.register_forward_hook(lambda m, args, y: y * 1.5)",
        "x + self.drop(self.linear(x).tanh())",
    ),
    "dropout_subclass": block(
        LINEAR + "\nself.drop = Halved(0.3)", "x + self.drop(self.linear(x).tanh())", draws=True
    ),
    # ------------------------------------------------------------ autograd
    "checkpoint": block(
        LINEAR, "x + torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False).tanh()"
    ),
    "reentrant_checkpoint": block(
        LINEAR, "x + torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=True).tanh()"
    ),
    "checkpoint_with_dropout": block(
        "self.inner = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.3), nn.Linear(D, D))",
        "x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False).tanh()",
        draws=True,
    ),
    "detached": block(LINEAR, "x + self.linear(x.detach()).tanh()"),
    "straight_through": block(
        LINEAR,
        """y = self.linear(x)
x + y + (y.sign() - y).detach()""",
    ),
    "under_no_grad": block(
        LINEAR + "\nself.other = nn.Linear(D, D)",
        """with torch.no_grad():
    y = self.other(x)
x + self.linear(y).tanh()""",
    ),
    "gradient_in_forward": block(
        LINEAR,
        """with torch.enable_grad():
    y = x if x.requires_grad else x.requires_grad_()
    (slope,) = torch.autograd.grad(self.linear(y).tanh().sum(), y, create_graph=True)
x + slope""",
    ),
    "own_function": block(LINEAR, "x + Square.apply(self.linear(x))"),
    "scripted": block("self.linear = torch.jit.script(nn.Linear(D, D))", "x + self.linear(x).tanh()"),
    "mode_of_training": block(LINEAR, "x + self.linear(x) if self.training else x * 0.5"),
    "vmap": block(LINEAR, "x + torch.vmap(lambda row: F.linear(row, self.linear.weight))(x).tanh()"),
    "copied_module": block(
        LINEAR + "\nself.other = copy.deepcopy(self.linear)", "x + self.other(self.linear(x).tanh())"
    ),
    "unregistered_module": block(
        LINEAR + "\nself.kept = [nn.Linear(D, D)]", "x + self.linear(self.kept[0].to(x.dtype)(x)).tanh()"
    ),
    "kept_weight": block(
        LINEAR + "\nself.kept = [self.linear.weight]", "x + F.linear(self.linear(x).tanh(), self.kept[0])"
    ),
    "kept_module": block(LINEAR + "\nself.kept = [self.linear]", "x + self.kept[0](self.linear(x).tanh())"),
    "two_calls": block(
        LINEAR,
        "x + self.inner(x) + self.inner(x.flip(1))",
        "def inner(self, x):\n    return self.linear(x).tanh()",
    ),
}
