"""All features by name: blocks, lines of the model's own class, and what is done to a finished model."""

from __future__ import annotations

from support.generated.feature import Feature
from support.generated.habits import HABITS
from support.generated.layers import LAYERS

BLOCKS = {**LAYERS, **HABITS}

ROOT: dict[str, Feature] = {
    "blocks_twice": Feature(forward="for block in self.blocks:\n    x = block(x)"),
    "alias": Feature(init="self.alias = self.blocks[0] if len(self.blocks) else self.first"),
    "tied_to_first": Feature(
        init="self.tied = nn.Linear(D, D)\nself.tied.weight = self.first.weight",
        forward="x = x + self.tied(x).tanh()",
    ),
    "tied_into_blocks": Feature(
        init="for module in self.blocks.modules():\n"
        "    if type(module) is nn.Linear and module.weight.shape == self.first.weight.shape:\n"
        "        module.weight = self.first.weight"
    ),
    "task_heads": Feature(
        init="self.heads = nn.ModuleList(nn.Linear(D, C) for _ in range(3))",
        forward="extra = x.new_zeros(len(x), C)\n"
        "for number, head in enumerate(self.heads):\n"
        "    rows = (task == number).nonzero().squeeze(1)\n"
        "    if len(rows):\n"
        "        extra = extra.index_add(0, rows, head(x[rows].mean(1)))",
        end="output = output + (extra if output.ndim == 2 else extra.unsqueeze(1))",
        parts=True,
    ),
    "seldom_block": Feature(
        init="self.rare = nn.Linear(D, D)",
        forward="if (task == 2).any():\n    x = torch.where((task == 2)[:, None, None], x + self.rare(x), x)",
        parts=True,
    ),
    "task_scales": Feature(
        init="self.scales = nn.ParameterList([torch.tensor(1.0 + n) for n in range(3)])",
        forward="for number, scale in enumerate(self.scales):\n"
        "    if (task == number).any():\n"
        "        x = torch.where((task == number)[:, None, None], x * scale, x)",
        parts=True,
    ),
    "weights_read": Feature(
        end="output = output * (1 + 0.1 * sum(p.square().mean() for p in self.blocks.parameters()))"
    ),
    "weight_of_block_used": Feature(
        forward="for parameter in list(self.blocks.parameters()):\n"
        "    if parameter.shape == (D, D):\n"
        "        x = x + F.linear(x, parameter).tanh()"
    ),
    "kept_first_weight": Feature(
        init="self.kept = [self.first.weight]", forward="x = x + F.linear(x, self.kept[0]).tanh()"
    ),
    "head_after_forward_of_blocks_only": Feature(forward="x = x + self.first(x).tanh()"),
    "own_call": Feature(methods="def __call__(self, *args):\n    return super().__call__(*args)"),
    "own_train": Feature(
        methods="def train(self, mode=True):\n    super().train(mode)\n    self.first.eval()\n    return self"
    ),
    "mean_of_output_taken": Feature(end="output = output - output.mean(0)", whole_batch=True),
    "divided_by_rows": Feature(end="output = output * (8 / len(output))", whole_batch=True),
    "own_parameters_method": Feature(
        init="self.extra = nn.Linear(D, D)",
        forward="x = x + self.extra(x).tanh()",
        methods="def parameters(self, recurse=True):\n"
        "    return iter([p for n, p in self.named_parameters() if not n.startswith('extra')])",
    ),
}

SETUP: dict[str, Feature] = {
    "frozen_first": Feature(setup="model.first.requires_grad_(False)"),
    "frozen_bias": Feature(setup="model.head.bias.requires_grad_(False)"),
    "all_frozen_but_head": Feature(setup="model.requires_grad_(False)\nmodel.head.requires_grad_(True)"),
    "root_forward_hook": Feature(setup="model.register_forward_hook(lambda m, args, y: scaled(y))"),
    "root_pre_hook": Feature(
        setup="model.register_forward_pre_hook(lambda m, args: (args[0] * 1.5, *args[1:]))"
    ),
    "first_forward_hook": Feature(setup="model.first.register_forward_hook(lambda m, args, y: y * 1.5)"),
    "first_backward_hook": Feature(
        setup="model.first.register_full_backward_pre_hook(lambda m, g: tuple(x * 0.5 for x in g))"
    ),
    "head_gradient_hook": Feature(setup="model.head.weight.register_hook(lambda g: g.tril())"),
    "first_accumulated_hook": Feature(
        setup="model.first.weight.register_post_accumulate_grad_hook(keep_lower)"
    ),
    "first_of_doubles": Feature(setup="model.first.weight.data.mul_(2.0)"),
    "given_gradients": Feature(setup="model.first.weight.grad = torch.ones(D, D)"),
    "in_eval_mode_first": Feature(setup="model.first.eval()"),
    "patched_forward": Feature(
        setup="forward = model.first.forward\nmodel.first.forward = lambda x: forward(x) * 1.5"
    ),
    "tied_head": Feature(setup="model.tie = model.head.weight  # one parameter, two names"),
    "channels_last_like": Feature(
        setup="model.first.weight.data = model.first.weight.data.t().contiguous().t()"
    ),
}

FEATURES = {**BLOCKS, **ROOT, **SETUP}
