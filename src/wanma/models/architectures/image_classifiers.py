"""Image classifiers: a small convolutional network and residual networks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wanma.models.config.dimensions import VisionConfig
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.structure.parallel_spec import ParallelSpec

VISION_PARALLEL_SPEC = ParallelSpec(blocks=None)
"""Parallel spec of image classifiers: small next to their activations, so never split within a layer."""

_LARGE_IMAGE_SIZE = 128
"""Minimum height or width for which a residual network begins with the stem made for ImageNet."""


def build_image_classifier(config: VisionConfig) -> nn.Module:
    """Build the network that `config` describe."""
    return ConvNet(config) if config.family == "convnet" else ResNet(config)


class _Classifier(nn.Module):
    """Base class of both families, with their common initialization."""

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a tile of parameter `name` in place (He et al. 2015 for layers before a ReLU)."""
        shape = self.get_parameter(name).shape
        if name == "classifier.weight":
            tensor.normal_(0.0, 0.01, generator=generator)
        elif len(shape) > 1:
            # Fan of outputs for convolutions, as in torchvision; of inputs for linear layers.
            fan = shape[0] * math.prod(shape[2:]) if len(shape) == 4 else shape[1]
            tensor.normal_(0.0, math.sqrt(2.0 / fan), generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("weight") else 0.0)


class ConvNet(_Classifier):
    """ConvNet: convolution-16, convolution-32, linear-128, linear-classes; convolutions are max-pooled."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.first = nn.Conv2d(config.channels, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * (config.height // 4) * (config.width // 4), 128)
        self.classifier = nn.Linear(128, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (rows, channels, height, width) to logits (rows, classes)."""
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        x = F.relu(self.hidden(x.flatten(1)))
        logits: Tensor = self.classifier(x)
        return logits


class ResNet(_Classifier):
    """ResNet-18 or ResNet-50 (He et al. 2015; stride in the 3 × 3 convolution, as torchvision's).

    Module names are torchvision's except `classifier` (there `fc`). Images smaller than 128 get the
    stem that He et al. use for CIFAR-10: one 3 × 3 convolution, no pooling.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        group = config.batch_norm_group
        self.has_imagenet_stem = max(config.height, config.width) >= _LARGE_IMAGE_SIZE
        kernel, stride = (7, 2) if self.has_imagenet_stem else (3, 1)
        self.conv1 = nn.Conv2d(config.channels, 64, kernel, stride, kernel // 2, bias=False)
        self.bn1 = GroupedBatchNorm(64, group)
        block, counts = _RESNET_STAGES[config.depth or 18]
        outputs = [64 * block.expansion << number for number in range(4)]
        self.layer1 = _stage(block, counts[0], 64, 64, 1, group)
        self.layer2 = _stage(block, counts[1], outputs[0], 128, 2, group)
        self.layer3 = _stage(block, counts[2], outputs[1], 256, 2, group)
        self.layer4 = _stage(block, counts[3], outputs[2], 512, 2, group)
        self.classifier = nn.Linear(outputs[3], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (rows, channels, height, width) to logits (rows, classes)."""
        x = F.relu(self.bn1(self.conv1(images)))
        if self.has_imagenet_stem:
            x = F.max_pool2d(x, 3, 2, 1)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Residual block of two 3 × 3 convolutions."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, group_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = GroupedBatchNorm(width, group_size)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = GroupedBatchNorm(width, group_size)
        self.downsample = _shortcut(channels, width, stride, group_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to (rows, width, height / stride, width / stride)."""
        branch = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(branch)) + self.downsample(x))


class Bottleneck(nn.Module):
    """Residual block of 1 × 1, 3 × 3 and 1 × 1 convolutions."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, group_size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = GroupedBatchNorm(width, group_size)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = GroupedBatchNorm(width, group_size)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = GroupedBatchNorm(4 * width, group_size)
        self.downsample = _shortcut(channels, 4 * width, stride, group_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to (rows, 4 × width, height / stride, width / stride)."""
        branch = F.relu(self.bn1(self.conv1(x)))
        branch = F.relu(self.bn2(self.conv2(branch)))
        return F.relu(self.bn3(self.conv3(branch)) + self.downsample(x))


_RESNET_STAGES: dict[int, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    50: (Bottleneck, (3, 4, 6, 3)),
}
"""Block type and number of blocks in each of the four stages, by depth (He et al. 2015, table 1)."""


def _stage(
    block: type[BasicBlock] | type[Bottleneck],
    count: int,
    channels: int,
    width: int,
    stride: int,
    group_size: int,
) -> nn.Sequential:
    later_blocks = [block(width * block.expansion, width, 1, group_size) for _ in range(count - 1)]
    return nn.Sequential(block(channels, width, stride, group_size), *later_blocks)


def _shortcut(channels: int, out: int, stride: int, group_size: int) -> nn.Module:
    if stride == 1 and channels == out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), GroupedBatchNorm(out, group_size))
