"""Functions outside compiled code: as torch's own, before and after the compiler is imported."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from wanma.torch_internals.uncompiled import defer_compiler, step_uncompiled, uncompiled

@uncompiled
def double(x):
    return x * 2 if not torch.compiler.is_compiling() else x * 0

defer_compiler()
with torch.device("meta"):
    torch.nn.init.normal_(torch.nn.Linear(2, 2).weight)
ours, theirs = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
theirs.load_state_dict(ours.state_dict())
optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
stepped = []
optimizer.register_step_post_hook(lambda *_: stepped.append(1))
ours(torch.ones(3, 2)).sum().backward()
step_uncompiled(optimizer)
optimizer.zero_grad()
assert double(torch.ones(1)).item() == 2 and stepped == [1]
assert "torch._dynamo" not in sys.modules

compiled = torch.compile(lambda x: double(x) + 1, backend="eager")
assert compiled(torch.ones(1)).item() == 3
assert "torch._dynamo" in sys.modules
reference = torch.optim.AdamW(theirs.parameters(), lr=0.1)
theirs(torch.ones(3, 2)).sum().backward()
step_uncompiled(reference)
assert torch.equal(ours.weight, theirs.weight)
wrapped = torch.optim.Optimizer.zero_grad.__wrapped__
assert getattr(wrapped, "__dynamo_disable", None) is not wrapped
"""


def test_functions_outside_compiled_code_work_before_and_after_the_compilers_import() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
