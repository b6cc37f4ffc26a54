"""torchvision's classification, segmentation, video and optical-flow architectures; none of the detection ones, which
need its compiled operators."""

from collections.abc import Callable

import torch
from torch import nn

from pt2mx.extras import import_extra
from tests.sweep.architecture import Architecture

SMALL, VIDEO = (2, 3, 64, 64), (1, 3, 8, 64, 64)
#: an untrained layer scale of 1e-6 would hide what a block computes
_WIDE_SCALE = {"layer_scale": 1.0}
_SWIN = {"patch_size": [4, 4], "embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}


def _vit(m: object) -> nn.Module:
    return m.VisionTransformer(
        image_size=64, patch_size=16, num_layers=2, num_heads=2, hidden_dim=48, mlp_dim=80, num_classes=10
    )


def _swin_v2(m: object) -> nn.Module:
    parts = m.swin_transformer
    return m.SwinTransformer(
        **_SWIN, num_classes=10, block=parts.SwinTransformerBlockV2, downsample_layer=parts.PatchMergingV2
    )


def _swin3d(m: object) -> nn.Module:
    settings = {"patch_size": [2, 4, 4], "embed_dim": 48, "depths": [2, 2], "num_heads": [2, 4]}
    return m.video.SwinTransformer3d(**settings, window_size=[4, 4, 4], num_classes=10)


def _maxvit(m: object) -> nn.Module:
    settings = {"stem_channels": 16, "partition_size": 4, "block_channels": [32, 48], "block_layers": [1, 1]}
    return m.MaxVit(input_size=(64, 64), **settings, head_dim=16, stochastic_depth_prob=0.0, num_classes=10)


def _mvit(m: object) -> nn.Module:
    block = m.video.mvit.MSBlockConfig
    blocks = [
        block(1, 48, 48, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 4, 4]),
        block(2, 48, 96, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
    ]
    v2 = {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True, "proj_after_attn": True}
    return m.video.MViT(spatial_size=(64, 64), temporal_size=8, block_setting=blocks, **v2, num_classes=10)


#: (name, size of the input, constructor or settings of torchvision's own)
_TABLE: tuple[tuple[str, tuple[int, ...], Callable | dict], ...] = (
    ("resnet18", SMALL, {}),
    ("alexnet", SMALL, {}),
    ("convnext_tiny", SMALL, _WIDE_SCALE),
    ("densenet121", SMALL, lambda m: m.DenseNet(16, (3, 4, 3, 2), 32, num_classes=10)),
    ("efficientnet_b0", SMALL, {}),
    ("efficientnet_v2_s", SMALL, {}),
    ("googlenet", SMALL, {"aux_logits": False, "init_weights": False}),
    ("inception_v3", (2, 3, 75, 75), {"aux_logits": False, "init_weights": False}),
    ("maxvit", SMALL, _maxvit),
    ("mnasnet0_5", SMALL, {}),
    ("mnasnet1_0", SMALL, {}),
    ("mobilenet_v2", SMALL, {}),
    ("mobilenet_v3_small", SMALL, {}),
    ("mobilenet_v3_large", SMALL, {}),
    ("regnet_x_400mf", SMALL, {}),
    ("regnet_y_400mf", SMALL, {}),
    ("resnet50", SMALL, {}),
    ("resnext50_32x4d", SMALL, {}),
    ("wide_resnet50_2", SMALL, {}),
    ("shufflenet_v2_x0_5", SMALL, {}),
    ("shufflenet_v2_x1_0", SMALL, {}),
    ("squeezenet1_0", SMALL, {}),
    ("squeezenet1_1", SMALL, {}),
    ("swin", SMALL, lambda m: m.SwinTransformer(**_SWIN, num_classes=10)),
    ("swin_v2", SMALL, _swin_v2),
    ("vgg11", SMALL, {"init_weights": False}),
    ("vgg11_bn", SMALL, {"init_weights": False}),
    ("vit", SMALL, _vit),
    ("deeplabv3_mobilenet_v3_large", SMALL, {"weights_backbone": None}),
    ("deeplabv3_resnet50", SMALL, {"weights_backbone": None}),
    ("fcn_resnet50", SMALL, {"weights_backbone": None}),
    ("lraspp_mobilenet_v3_large", SMALL, {"weights_backbone": None}),
    ("r3d_18", VIDEO, {}),
    ("mc3_18", VIDEO, {}),
    ("r2plus1d_18", VIDEO, {}),
    ("s3d", (1, 3, 16, 224, 224), {}),
    ("mvit_v2", VIDEO, _mvit),
    ("swin3d", VIDEO, _swin3d),
    ("raft_small", (1, 3, 128, 128), {}),
)


def _architecture(name: str, size: tuple[int, ...], make: Callable | dict) -> Architecture:
    def construct() -> tuple[nn.Module, tuple]:
        models = import_extra("torchvision", "vision").models
        if name == "raft_small":
            return models.get_model(name, weights=None), (torch.randn(size), torch.randn(size), 2)  # 2 updates
        module = make(models) if callable(make) else models.get_model(name, weights=None, num_classes=10, **make)
        return module, (torch.randn(size),)

    return Architecture(name, "vision", construct)


ARCHITECTURES = tuple(_architecture(*row) for row in _TABLE)
