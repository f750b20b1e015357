"""Small convolutional networks for images: PyTorch's MNIST example (BasicNet), a ResNet of three stages, and a U-Net.

They take pixel_values, float [n, channels, height, width], and return the logits of the classes, float [n, classes];
the U-Net returns them for each pixel.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import interpolate

NAMES = {
    "basicnet": "lockstep.model.convnets:BasicNet",
    "basicnet_bn": "lockstep.model.convnets:BasicNetBN",
    "resnet": "lockstep.model.convnets:ResNet",
    "unet": "lockstep.model.convnets:UNet",
}


class BasicNet(nn.Module):
    """Two 3x3 convolutions of 32 and 64 channels, max pooling, and two linear layers; dropout of .25 and .5.

    This is the network of PyTorch's MNIST example (examples/mnist, 2016). Images of 28 x 28 pixels give 9216 features,
    followed by layers of 128 and 10.
    """

    normalisation: type[nn.Module] = nn.Identity

    def __init__(self, channels: int, height: int, width: int, classes: int):
        super().__init__()
        flat = 64 * ((height - 4) // 2) * ((width - 4) // 2)
        if min(height, width) < 6:
            raise ValueError(f"images of {height} x {width} pixels are too small; 6 x 6 is the least")
        bias = self.normalisation is nn.Identity  # a normalisation would subtract it again
        self.conv1, self.norm1 = nn.Conv2d(channels, 32, 3, bias=bias), self.normalisation(32)
        self.conv2, self.norm2 = nn.Conv2d(32, 64, 3, bias=bias), self.normalisation(64)
        self.pool, self.dropout1 = nn.MaxPool2d(2), nn.Dropout(0.25)
        self.fc1, self.dropout2, self.fc2 = nn.Linear(flat, 128), nn.Dropout(0.5), nn.Linear(128, classes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        hidden = self.norm1(self.conv1(pixel_values)).relu()
        hidden = self.norm2(self.conv2(hidden)).relu()
        hidden = self.dropout1(self.pool(hidden)).flatten(1)
        return self.fc2(self.dropout2(self.fc1(hidden).relu()))


class BasicNetBN(BasicNet):
    """BasicNet with batch normalisation after each convolution (Ioffe and Szegedy 2015, arXiv:1502.03167)."""

    normalisation = nn.BatchNorm2d


class ResNet(nn.Module):
    """ResNet-8 for small images: three stages of one residual block each, of 16, 32 and 64 channels.

    The CIFAR networks of He et al. 2016 (arXiv:1512.03385, section 4.2), with n = 1.
    """

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.stages = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, classes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.begin(pixel_values)).mean(dim=(2, 3)))


class Block(nn.Module):
    """A residual block: two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(self.norm1(self.conv1(hidden)).relu()))
        return (inner + self.shortcut(hidden)).relu()


class Segmented(NamedTuple):
    """A segmentation network's output for each pixel."""

    logits: torch.Tensor  # of the classes: float [n, classes, height, width]
    boundary: torch.Tensor  # the logit of an outline: float [n, height, width]


class UNet(nn.Module):
    """A U-Net of three levels of 16, 32 and 64 channels, with batch normalisation, and two outputs for each pixel.

    It follows Ronneberger et al. 2015 (arXiv:1505.04597), with one convolution per level in place of their two.
    """

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.down1, self.down2, self.down3 = _normed(channels, 16, 1), _normed(16, 32, 2), _normed(32, 64, 2)
        self.inner = _normed(64, 64, 1)
        self.up2, self.up1 = _normed(64 + 32, 32, 1), _normed(32 + 16, 16, 1)
        self.classes, self.boundary = nn.Conv2d(16, classes, 1), nn.Conv2d(16, 1, 1)

    def forward(self, pixel_values: torch.Tensor) -> Segmented:
        whole = self.down1(pixel_values)
        half = self.down2(whole)
        hidden = self.inner(self.down3(half))
        hidden = self.up2(torch.cat([_enlarged(hidden, half), half], dim=1))
        hidden = self.up1(torch.cat([_enlarged(hidden, whole), whole], dim=1))
        return Segmented(self.classes(hidden), self.boundary(hidden)[:, 0])


def _normed(before: int, after: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def _enlarged(hidden: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """`hidden` enlarged to the height and width of `beside`, each pixel repeated."""
    return interpolate(hidden, size=beside.shape[2:], mode="nearest")
