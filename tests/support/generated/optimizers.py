"""Optimizers of one's own, as source of a class `Own`. Most couple after several updates only."""

from __future__ import annotations

BUILT_IN = "built in"
"""The job's own optimizer."""

_DESCENT = """\
class Descent(torch.optim.Optimizer):
    def __init__(self, groups, lr, weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(group["lr"] * self.change(parameter, parameter.grad, group))

    def change(self, parameter, gradient, group):
        return gradient

    def count(self, parameter, key="step"):
        count = self.state[parameter].setdefault(key, torch.zeros(()))
        return count.add_(1)


"""


def _change(lines: str) -> str:
    return _descent(f"def change(self, parameter, gradient, group):\n{_indented(lines)}")


def _descent(methods: str) -> str:
    return f"{_DESCENT}class Own(Descent):\n{_indented(methods)}"


def _indented(text: str) -> str:
    return "\n".join("    " + line if line else line for line in text.split("\n"))


OPTIMIZERS = {
    BUILT_IN: "",
    # ------------------------------------------------------------ element by element
    "rectified_late": "Own = torch.optim.RAdam",
    "momentum_late": _change("""state = self.state[parameter]
momentum = state.setdefault("momentum", torch.zeros_like(parameter))
if self.count(parameter) < 14:
    return gradient
return momentum.lerp_(gradient, 0.3)"""),
    "state_made_late": _change("""if self.count(parameter) < 14:
    return gradient
return self.state[parameter].setdefault("momentum", torch.zeros_like(parameter)).lerp_(gradient, 0.3)"""),
    # ------------------------------------------------------------ the elements of a tensor
    "norm_of_the_tensor_late": _change(
        "return gradient / gradient.norm() if self.count(parameter) > 14 else gradient"
    ),
    "norm_of_the_tensor_each_sixteenth": _change(
        "return gradient / gradient.norm() if self.count(parameter) % 16 == 0 else gradient"
    ),
    "norm_of_the_tensor_after_a_countdown": _change("""state = self.state[parameter]
left = state.setdefault("left", torch.tensor(14.0))
return gradient / gradient.norm() if left.sub_(1) < 0 else gradient"""),
    "norm_of_the_tensor_after_many_samples": _change(
        """seen = self.state[parameter].setdefault("seen", torch.zeros(())).add_(32)
return gradient / gradient.norm() if seen > 448 else gradient"""
    ),
    # ------------------------------------------------------------ several tensors
    "norm_of_the_model_late": _descent("""def step(self, closure=None):
    parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
    if max(self.count(parameter, "updates") for parameter in parameters) > 14:
        nn.utils.clip_grad_norm_(parameters, 0.01)
    super().step()"""),
    # ------------------------------------------------------------ state of groups and of the object
    "counted_in_the_group": _change("""group["changes"] = group.get("changes", 0) + 1
return gradient / gradient.norm() if group["changes"] > 80 else gradient"""),
    "counted_in_the_object": _change("""self.changes = getattr(self, "changes", 0) + 1
return gradient / gradient.norm() if self.changes > 80 else gradient"""),
}
"""Source of an optimizer by its name."""
