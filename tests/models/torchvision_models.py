"""Models of torchvision, smaller than published."""

import importlib
import sys

import torch
import torch.nn.functional as F
from task import Task, classes, in_double, numbers
from torch import nn

try:
    importlib.import_module("torchvision")
except RuntimeError:  # the operators of a build for CUDA do not load where torch is a build for the CPU
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for _name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[_name]

from torchvision import models as tv
from torchvision.models import convnext, densenet, efficientnet, regnet, resnet, shufflenetv2, swin_transformer


def small_resnet():
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=4)


def small_resnext():
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=4, groups=4, width_per_group=8)


def small_densenet(memory_efficient=False):
    return densenet.DenseNet(8, (2, 2), 8, num_classes=4, memory_efficient=memory_efficient)


def checkpointed_densenet():
    return small_densenet(memory_efficient=True)


def small_mobilenet_v2():
    return tv.mobilenet_v2(num_classes=4, width_mult=0.25, dropout=0.0)


def small_mobilenet_v3():
    return tv.mobilenet_v3_small(num_classes=4, width_mult=0.25, dropout=0.0)


def small_shufflenet():
    return shufflenetv2.ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 64], num_classes=4)


def small_mnasnet():
    return tv.MNASNet(0.2, num_classes=4, dropout=0.0)


def small_squeezenet():
    return tv.squeezenet1_1(num_classes=4, dropout=0.0)


def googlenet():
    return tv.googlenet(num_classes=4, aux_logits=True, init_weights=False, dropout=0.0, dropout_aux=0.0)


def googlenet_loss(output, target):
    if isinstance(output, torch.Tensor):
        return F.cross_entropy(output, target)
    return sum(weight * F.cross_entropy(o, target) for weight, o in zip((1.0, 0.3, 0.3), output, strict=True))


def small_efficientnet():
    conf = efficientnet.MBConvConfig
    setting = [conf(1, 3, 1, 8, 8, 1, 1.0, 1.0), conf(4, 5, 2, 8, 16, 2, 1.0, 1.0)]
    return efficientnet.EfficientNet(setting, 0.0, stochastic_depth_prob=0.2, num_classes=4, last_channel=32)


def small_regnet():
    params = regnet.BlockParams.from_init_params(depth=4, w_0=8, w_a=8.0, w_m=2.0, group_width=8, se_ratio=0.25)
    return regnet.RegNet(params, num_classes=4, stem_width=8)


def small_vit():
    return tv.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=4)


def small_swin():
    return swin_transformer.SwinTransformer([4, 4], 8, [2, 2], [1, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=4)


def small_swin_v2():
    return swin_transformer.SwinTransformer(
        [4, 4],
        8,
        [2, 2],
        [1, 2],
        [4, 4],
        stochastic_depth_prob=0.2,
        num_classes=4,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    )


def small_convnext():
    setting = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 2)]
    return convnext.ConvNeXt(setting, stochastic_depth_prob=0.2, num_classes=4)


def small_maxvit():
    return tv.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 8, 0.0, num_classes=4)


def segmentation():
    return tv.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)


def fcn():
    """With a dict as output, and an auxiliary head."""
    backbone = tv._utils.IntermediateLayerGetter(small_resnet(), {"layer3": "aux", "layer4": "out"})
    head, aux = (tv.segmentation.fcn.FCNHead(channels, 4) for channels in (512, 256))
    for dropout in (m for h in (head, aux) for m in h if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    return tv.segmentation.FCN(backbone, head, aux)


def segmentation_loss(output, target):
    loss = F.cross_entropy(output["out"], target)
    return loss + 0.5 * F.cross_entropy(output["aux"], target) if "aux" in output else loss


IMAGE, CLASS = numbers(3, 32, 32), classes(4)
MODELS = {
    "resnet": Task(small_resnet, IMAGE, CLASS),
    "resnext": Task(small_resnext, IMAGE, CLASS),
    "densenet": Task(small_densenet, IMAGE, CLASS),
    "densenet_checkpointed": Task(checkpointed_densenet, IMAGE, CLASS),
    "mobilenet_v2": Task(small_mobilenet_v2, numbers(3, 64, 64), CLASS),
    "mobilenet_v3": Task(small_mobilenet_v3, numbers(3, 64, 64), CLASS),
    "shufflenet": Task(small_shufflenet, numbers(3, 64, 64), CLASS),
    "mnasnet": Task(small_mnasnet, numbers(3, 64, 64), CLASS),
    "squeezenet": Task(small_squeezenet, numbers(3, 64, 64), CLASS),
    "googlenet": Task(googlenet, numbers(3, 64, 64), CLASS, googlenet_loss),
    "efficientnet": Task(small_efficientnet, IMAGE, CLASS, noisy=True),
    "regnet": Task(small_regnet, numbers(3, 64, 64), CLASS),
    "vit": Task(small_vit, IMAGE, CLASS),
    "swin": Task(small_swin, IMAGE, CLASS),
    "swin_v2": Task(small_swin_v2, IMAGE, CLASS, noisy=True),
    "convnext": Task(small_convnext, IMAGE, CLASS, noisy=True),
    "maxvit": Task(small_maxvit, IMAGE, CLASS),
    "lraspp": Task(segmentation, numbers(3, 64, 64), classes(4, 64, 64), segmentation_loss),
    "fcn": Task(fcn, IMAGE, classes(4, 32, 32), segmentation_loss),
}
MODELS = {name: in_double(task) for name, task in MODELS.items()}
