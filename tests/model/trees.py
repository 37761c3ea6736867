"""Module trees after torchvision's, timm's and others' models, smaller, on the meta device.

A plan without a batch runs no forward, so these have none of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests.modules import Net


class Tree(Net):
    """Children by name."""

    def __init__(self, **children: nn.Module | nn.Parameter) -> None:
        super().__init__(**children)


class Bottleneck(Tree): ...


class Block(Tree): ...


class Attention(Tree): ...


class Mlp(Tree): ...


class ConvNeXtBlock(Tree): ...


class Stage(Tree): ...


class ConvNormActivation(nn.Sequential): ...


class MBConv(Tree): ...


class DoubleConv(Tree): ...


class EncoderLayer(Tree): ...


class DecoderLayer(Tree): ...


class MixerBlock(Tree): ...


def mlp(width: int, hidden: int) -> Mlp:
    return Mlp(fc1=nn.Linear(width, hidden), act=nn.GELU(), fc2=nn.Linear(hidden, width))


def bottlenecks(num_in: int, width: int, depth: int) -> nn.Sequential:
    """One of ResNet's layers."""
    blocks = []
    for i in range(depth):
        own = num_in if i == 0 else 4 * width
        block = Bottleneck(
            conv1=nn.Conv2d(own, width, 1, bias=False),
            bn1=nn.BatchNorm2d(width),
            conv2=nn.Conv2d(width, width, 3, bias=False),
            bn2=nn.BatchNorm2d(width),
            conv3=nn.Conv2d(width, 4 * width, 1, bias=False),
            bn3=nn.BatchNorm2d(4 * width),
        )
        if i == 0:
            shortcut = nn.Conv2d(own, 4 * width, 1, bias=False)
            block.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))
        blocks.append(block)
    return nn.Sequential(*blocks)


def resnet() -> Tree:
    """torchvision's: layers of Bottlenecks, as Sequentials."""
    return Tree(
        conv1=nn.Conv2d(3, 32, 7, bias=False),
        bn1=nn.BatchNorm2d(32),
        layer1=bottlenecks(32, 32, 3),
        layer2=bottlenecks(128, 64, 4),
        layer3=bottlenecks(256, 128, 6),
        layer4=bottlenecks(512, 256, 3),
        fc=nn.Linear(1024, 100),
    )


def convnext() -> Tree:
    """timm's: a Sequential of stages, which hold a Sequential of blocks."""
    dims = (48, 96, 192, 384)
    stages = []
    for depth, num_in, dim in zip((3, 3, 9, 3), (48, *dims), dims, strict=False):
        blocks = [
            ConvNeXtBlock(
                gamma=nn.Parameter(torch.empty(dim)),
                conv_dw=nn.Conv2d(dim, dim, 7, groups=dim),
                norm=nn.LayerNorm(dim),
                mlp=mlp(dim, 4 * dim),
            )
            for _ in range(depth)
        ]
        down = nn.Sequential(nn.LayerNorm(num_in), nn.Conv2d(num_in, dim, 2))
        stages.append(Stage(downsample=down, blocks=nn.Sequential(*blocks)))
    return Tree(
        stem=nn.Sequential(nn.Conv2d(3, 48, 4), nn.LayerNorm(48)),
        stages=nn.Sequential(*stages),
        head=Tree(norm=nn.LayerNorm(384), fc=nn.Linear(384, 100)),
    )


def block(width: int) -> Block:
    """A transformer's, as timm has it."""
    return Block(
        norm1=nn.LayerNorm(width),
        attn=Attention(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width)),
        norm2=nn.LayerNorm(width),
        mlp=mlp(width, 4 * width),
    )


def swin() -> Tree:
    """timm's: stages of other widths, in which blocks are a Sequential."""
    dims = (48, 96, 192, 384)
    stages = []
    for depth, num_in, dim in zip((2, 2, 6, 2), (0, *dims), dims, strict=False):
        stage = Stage(blocks=nn.Sequential(*(block(dim) for _ in range(depth))))
        if num_in:
            stage.downsample = Tree(norm=nn.LayerNorm(2 * dim), reduction=nn.Linear(2 * dim, dim))
        stages.append(stage)
    return Tree(
        patch_embed=Tree(proj=nn.Conv2d(3, 48, 4), norm=nn.LayerNorm(48)),
        layers=nn.Sequential(*stages),
        norm=nn.LayerNorm(384),
        head=Tree(fc=nn.Linear(384, 100)),
    )


def vit() -> Tree:
    """timm's: a Sequential of blocks, and params of the model itself."""
    return Tree(
        cls_token=nn.Parameter(torch.empty(1, 1, 192)),
        pos_embed=nn.Parameter(torch.empty(1, 197, 192)),
        patch_embed=Tree(proj=nn.Conv2d(3, 192, 16)),
        blocks=nn.Sequential(*(block(192) for _ in range(8))),
        norm=nn.LayerNorm(192),
        head=nn.Linear(192, 100),
    )


def conv_norm(num_in: int, num_out: int, size: int = 1, groups: int = 1) -> ConvNormActivation:
    conv = nn.Conv2d(num_in, num_out, size, groups=groups, bias=False)
    return ConvNormActivation(conv, nn.BatchNorm2d(num_out), nn.SiLU())


def mb_conv(num_in: int, num_out: int) -> MBConv:
    wide = 6 * num_in
    squeeze = Tree(fc1=nn.Conv2d(wide, num_in // 4, 1), fc2=nn.Conv2d(num_in // 4, wide, 1))
    depthwise = conv_norm(wide, wide, 3, groups=wide)
    parts = (conv_norm(num_in, wide), depthwise, squeeze, conv_norm(wide, num_out))
    return MBConv(block=nn.Sequential(*parts))


def efficientnet() -> Tree:
    """torchvision's: a Sequential of Sequentials of blocks, which hold Sequentials again."""
    stages: list[nn.Module] = [conv_norm(3, 16, 3)]
    for num_in, num_out in pairwise((16, 24, 40, 80, 112, 192, 320)):
        blocks = (mb_conv(num_in, num_out), *(mb_conv(num_out, num_out) for _ in range(2)))
        stages.append(nn.Sequential(*blocks))
    stages.append(conv_norm(320, 1280))
    head = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 100))
    return Tree(features=nn.Sequential(*stages), avgpool=nn.AdaptiveAvgPool2d(1), classifier=head)


def double_conv(num_in: int, num_out: int) -> DoubleConv:
    layers: list[nn.Module] = []
    for own in (num_in, num_out):
        conv = nn.Conv2d(own, num_out, 3, bias=False)
        layers += [conv, nn.BatchNorm2d(num_out), nn.ReLU()]
    return DoubleConv(conv=nn.Sequential(*layers))


def unet() -> Tree:
    """No two blocks have the same shapes; those of the way up alternate with others."""
    dims = (3, 32, 64, 128, 256)
    ups: list[nn.Module] = []
    for dim in reversed(dims[1:]):
        ups += [nn.ConvTranspose2d(2 * dim, dim, 2), double_conv(2 * dim, dim)]
    return Tree(
        downs=nn.ModuleList(double_conv(a, b) for a, b in pairwise(dims)),
        bottleneck=double_conv(256, 512),
        ups=nn.ModuleList(ups),
        final_conv=nn.Conv2d(32, 1, 1),
    )


def detr() -> Tree:
    """A ResNet, and a transformer whose encoder and decoder are lists of layers."""
    width = 192

    def attention() -> Attention:
        return Attention(
            in_proj_weight=nn.Parameter(torch.empty(3 * width, width)),
            out_proj=nn.Linear(width, width),
        )

    def rest() -> dict[str, nn.Module]:
        return {
            "linear1": nn.Linear(width, 4 * width),
            "linear2": nn.Linear(4 * width, width),
            "norm1": nn.LayerNorm(width),
            "norm2": nn.LayerNorm(width),
        }

    encoder = [EncoderLayer(self_attn=attention(), **rest()) for _ in range(6)]
    decoder = [
        DecoderLayer(self_attn=attention(), multihead_attn=attention(), **rest()) for _ in range(6)
    ]
    return Tree(
        transformer=Tree(
            encoder=Tree(layers=nn.ModuleList(encoder)),
            decoder=Tree(layers=nn.ModuleList(decoder), norm=nn.LayerNorm(width)),
        ),
        class_embed=nn.Linear(width, 92),
        bbox_embed=Tree(layers=nn.ModuleList(nn.Linear(width, width) for _ in range(3))),
        query_embed=nn.Embedding(100, width),
        input_proj=nn.Conv2d(1024, width, 1),
        backbone=nn.Sequential(Tree(body=resnet()), Tree()),
    )


def mixer() -> Tree:
    """timm's: blocks of two Mlps."""
    blocks = [
        MixerBlock(
            norm1=nn.LayerNorm(192),
            mlp_tokens=mlp(196, 96),
            norm2=nn.LayerNorm(192),
            mlp_channels=mlp(192, 768),
        )
        for _ in range(8)
    ]
    return Tree(
        stem=Tree(proj=nn.Conv2d(3, 192, 16)),
        blocks=nn.Sequential(*blocks),
        norm=nn.LayerNorm(192),
        head=nn.Linear(192, 100),
    )


# By name: the model, and the units that one would choose by hand
TREES: dict[str, tuple[Callable[[], Tree], Any]] = {
    "resnet": (resnet, Bottleneck),
    "convnext": (convnext, ConvNeXtBlock),
    "swin": (swin, Block),
    "vit": (vit, Block),
    "efficientnet": (efficientnet, MBConv),
    "unet": (unet, DoubleConv),
    "detr": (detr, [Bottleneck, EncoderLayer, DecoderLayer]),
    "mixer": (mixer, MixerBlock),
}
