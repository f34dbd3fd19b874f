"""Losses and targets of one's own, as source, each beside the same loss of a global batch in plain torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    """Targets and a loss of them. `y` of the model's output is its logits (rows, C) or (rows, T, C)."""

    targets: str
    """Expression of all targets, (size, ...), from `g`, a generator, and `size`."""
    loss: str
    """Body of `loss(y, targets)`, which gives one loss per target."""
    plain: str
    """Body of `plain(y, targets)`, which gives (sum, number) of a global batch."""
    positions: bool = False
    """Logits are of every position."""
    end: str = ""
    """Lines of the model's forward, from `output` to `output`."""
    default: bool = False
    """`wanma.train` is given no loss."""
    whole_batch: bool = False
    """Defined over the batch it is given."""


CLASSES = "torch.randint(C, (size,), generator=g)"
TOKENS = "torch.randint(C, (size, T), generator=g)"
MASKED = f"torch.where(torch.rand(size, T, generator=g) < 0.4, IGNORED, {TOKENS})"
NUMBERS = "torch.randn(size, C, generator=g)"
ENTROPY = 'return F.cross_entropy(y, targets, reduction="none")'
FLAT = 'return F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)'
BYTE_156 = f"({CLASSES} + 154).to(torch.uint8)"
CLASSES_TO_156 = "output = F.pad(output, (154, 0))"
SUM_BUT_IGNORED = (
    'total = F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum")\n'
    "return total, (targets != -100).sum()"
)

LOSSES: dict[str, Loss] = {
    "squares": Loss(
        NUMBERS,
        "return (y - targets).square()",
        "return (y - targets).square().sum(), targets.numel()",
    ),
    "squares_by_sample": Loss(
        NUMBERS,
        "return (y - targets).square().mean(1)",
        "return (y - targets).square().mean(1).sum(), len(targets)",
    ),
    "entropy": Loss(CLASSES, ENTROPY, 'return F.cross_entropy(y, targets, reduction="sum"), len(targets)'),
    "default": Loss(
        CLASSES, ENTROPY, 'return F.cross_entropy(y, targets, reduction="sum"), len(targets)', default=True
    ),
    "default_of_positions": Loss(
        TOKENS,
        FLAT,
        'return F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()',
        positions=True,
        default=True,
    ),
    "default_partly_masked": Loss(
        MASKED.replace("IGNORED", "-100"),
        FLAT,
        SUM_BUT_IGNORED,
        positions=True,
        default=True,
    ),
    "default_classes_second": Loss(
        TOKENS,
        ENTROPY,
        'return F.cross_entropy(y, targets, reduction="sum"), targets.numel()',
        positions=True,
        end="output = output.transpose(1, 2)",
        default=True,
    ),
    "default_of_int32": Loss(
        f"{CLASSES}.int()",
        'return F.cross_entropy(y, targets.long(), reduction="none")',
        'return F.cross_entropy(y, targets.long(), reduction="sum"), len(targets)',
        default=True,
    ),
    "default_of_bytes": Loss(
        f"{CLASSES}.to(torch.uint8)",
        ENTROPY,
        'return F.cross_entropy(y, targets, reduction="sum"), len(targets)',
        default=True,
    ),
    "default_of_byte_156": Loss(
        BYTE_156,
        ENTROPY,
        'return F.cross_entropy(y, targets, reduction="sum"), len(targets)',
        end=CLASSES_TO_156,
        default=True,
    ),
    "default_of_masked_int8": Loss(
        f"({MASKED.replace('IGNORED', '-100')}).to(torch.int8)",
        FLAT.replace("targets.flatten()", "targets.flatten().long()"),
        SUM_BUT_IGNORED.replace("targets.flatten()", "targets.flatten().long()"),
        positions=True,
        default=True,
    ),
    "default_of_uint16": Loss(
        f"{CLASSES}.to(torch.uint16)",
        'return F.cross_entropy(y, targets.long(), reduction="none")',
        'return F.cross_entropy(y, targets.long(), reduction="sum"), len(targets)',
        default=True,
    ),
    "byte_156": Loss(
        BYTE_156,
        ENTROPY,
        'return F.cross_entropy(y, targets, reduction="sum"), len(targets)',
        end=CLASSES_TO_156,
    ),
    "bytes_that_wrap": Loss(
        "torch.randint(155, 158, (size, C), generator=g).to(torch.uint8)",
        "return (y - (100 - targets) / 100).square()",
        "return (y - (100 - targets) / 100).square().sum(), targets.numel()",
    ),
    "default_of_probabilities": Loss(
        f"{NUMBERS}.softmax(1)",
        ENTROPY,
        'return F.cross_entropy(y, targets, reduction="sum"), len(targets)',
        default=True,
    ),
    "partly_masked": Loss(
        MASKED.replace("IGNORED", "-100"),
        FLAT,
        SUM_BUT_IGNORED,
        positions=True,
    ),
    "classes_second": Loss(
        MASKED.replace("IGNORED", "-100"),
        'return F.cross_entropy(y.transpose(1, 2), targets, reduction="none")',
        SUM_BUT_IGNORED,
        positions=True,
    ),
    "ignored_255": Loss(
        MASKED.replace("IGNORED", "255"),
        'losses = F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=255)\n'
        "return losses.view(targets.shape)",
        'total = F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=255)\n'
        "return total, (targets != 255).sum()",
        positions=True,
    ),
    "module_ignoring_255": Loss(
        MASKED.replace("IGNORED", "255"),
        "return ENTROPY_BUT_255(y.transpose(1, 2), targets)",
        'total = F.cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=255)\n'
        "return total, (targets != 255).sum()",
        positions=True,
    ),
    "ignored_int32": Loss(
        f"({MASKED.replace('IGNORED', '-100')}).int()",
        "return F.cross_entropy(y.flatten(0, 1), targets.long().flatten(), "
        'reduction="none").view(targets.shape)',
        'return F.cross_entropy(y.flatten(0, 1), targets.long().flatten(), reduction="sum"), '
        "(targets != -100).sum()",
        positions=True,
    ),
    "weighted_classes": Loss(
        CLASSES,
        'return F.cross_entropy(y, targets, torch.tensor([0.5, 1.0, 2.0], dtype=y.dtype), reduction="none")',
        "w = torch.tensor([0.5, 1.0, 2.0], dtype=y.dtype)\n"
        'return F.cross_entropy(y, targets, w, reduction="sum"), len(targets)',
    ),
    "smoothed": Loss(
        CLASSES,
        'return F.cross_entropy(y, targets, reduction="none", label_smoothing=0.1)',
        'return F.cross_entropy(y, targets, reduction="sum", label_smoothing=0.1), len(targets)',
    ),
    "masked_by_product": Loss(
        NUMBERS,
        "return (y - targets).square() * (targets > 0)",
        "return ((y - targets).square() * (targets > 0)).sum(), targets.numel()",
    ),
    "regression_of_integers": Loss(
        "torch.randint(-101, -98, (size, C), generator=g)",
        "return (y - targets / 100).square()",
        "return (y - targets / 100).square().sum(), targets.numel()",
    ),
    "huber_of_two_dims": Loss(
        "torch.randn(size, T, C, generator=g)",
        'return F.smooth_l1_loss(y, targets, reduction="none")',
        'return F.smooth_l1_loss(y, targets, reduction="sum"), targets.numel()',
        positions=True,
    ),
    "binary": Loss(
        "(torch.rand(size, C, generator=g) < 0.4).float()",
        'return F.binary_cross_entropy_with_logits(y, targets.to(y.dtype), reduction="none")',
        'return F.binary_cross_entropy_with_logits(y, targets.to(y.dtype), reduction="sum"), targets.numel()',
    ),
    "binary_of_bool": Loss(
        "torch.rand(size, C, generator=g) < 0.4",
        'return F.binary_cross_entropy_with_logits(y, targets.to(y.dtype), reduction="none")',
        'return F.binary_cross_entropy_with_logits(y, targets.to(y.dtype), reduction="sum"), targets.numel()',
    ),
    "loss_module": Loss(
        CLASSES,
        "return ENTROPY(y, targets)",
        'return F.cross_entropy(y, targets, reduction="sum"), len(targets)',
    ),
    "mean": Loss(
        NUMBERS,
        "return (y - targets).square().mean()",
        "return (y - targets).square().sum(), targets.numel()",
    ),
    "mean_of_rows": Loss(
        NUMBERS,
        "return (y - targets).square().mean(0)",
        "return (y - targets).square().sum(), targets.numel()",
    ),
    "mean_in_each_row": Loss(
        NUMBERS,
        "return (y - targets).square().mean().expand(len(y))",
        "return (y - targets).square().sum(), targets.numel()",
        whole_batch=True,
    ),
    "in_batch_negatives": Loss(
        NUMBERS,
        'return F.cross_entropy(y @ targets.to(y).t(), torch.arange(len(y)), reduction="none")',
        'return F.cross_entropy(y @ targets.to(y).t(), torch.arange(len(y)), reduction="sum"), len(y)',
        whole_batch=True,
    ),
    "contrastive": Loss(
        NUMBERS,
        "others, own = wanma.global_batch(targets).to(y), wanma.global_rows(y)\n"
        'there = F.cross_entropy(y @ others.t(), own, reduction="none")\n'
        'return there + F.cross_entropy(targets.to(y) @ wanma.global_batch(y).t(), own, reduction="none")',
        "own = torch.arange(len(y))\n"
        'there = F.cross_entropy(y @ targets.to(y).t(), own, reduction="sum")\n'
        'return there + F.cross_entropy(targets.to(y) @ y.t(), own, reduction="sum"), len(y)',
    ),
    "standardised": Loss(
        NUMBERS,
        "return ((y - y.mean(0)) / (y.std(0, correction=0) + 0.1) - targets).square()",
        "return ((y - y.mean(0)) / (y.std(0, correction=0) + 0.1) - targets).square().sum(), targets.numel()",
        whole_batch=True,
    ),
}
