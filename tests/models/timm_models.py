"""Models of timm, the smallest of their kinds, on images of 64 × 64 pixels."""

import torchvision_models  # noqa: F401  first, for timm imports torchvision as it is

import timm  # isort: skip
from task import Task, classes, in_double, numbers
from timm.models.convmixer import ConvMixer
from timm.models.metaformer import MetaFormer
from timm.models.mlp_mixer import MlpMixer
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg


def model(name, **settings):
    """A function that builds the model of this name in timm."""

    def build():
        return timm.create_model(name, num_classes=4, **settings)

    return build


IMAGE, CLASS = numbers(3, 64, 64), classes(4)
SIZED = {"img_size": 64}
MVIT = MultiScaleVitCfg(depths=(1, 1), embed_dim=16)
MODELS = {
    "resnet": Task(model("test_resnet"), IMAGE, CLASS),
    "resnet_droppath": Task(model("test_resnet", drop_path_rate=0.2), IMAGE, CLASS, noisy=True),
    "efficientnet": Task(model("test_efficientnet"), IMAGE, CLASS),
    "efficientnet_evos": Task(model("test_efficientnet_evos"), IMAGE, CLASS),
    "byobnet": Task(model("test_byobnet"), IMAGE, CLASS),
    "nfnet": Task(model("test_nfnet"), IMAGE, CLASS),
    "convnext": Task(model("test_convnext", drop_path_rate=0.2), IMAGE, CLASS, noisy=True),
    "mambaout": Task(model("test_mambaout"), IMAGE, CLASS),
    "vit": Task(model("test_vit", **SIZED), IMAGE, CLASS),
    "vit_registers": Task(model("test_vit4", **SIZED), IMAGE, CLASS),
    "vit_average_pool": Task(model("test_vit2", **SIZED), IMAGE, CLASS),
    "swin": Task(
        model("swin_tiny_patch4_window7_224", **SIZED, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4),
        IMAGE,
        CLASS,
        noisy=True,
    ),
    "mixer": Task(lambda: MlpMixer(4, 64, embed_dim=32, num_blocks=2), IMAGE, CLASS),
    "deit": Task(model("deit_tiny_distilled_patch16_224", **SIZED, embed_dim=24, depth=2), IMAGE, CLASS),
    "cait": Task(model("cait_xxs24_224", **SIZED, embed_dim=24, depth=2, num_heads=2), IMAGE, CLASS),
    "xcit": Task(model("xcit_nano_12_p16_224", **SIZED, embed_dim=32, depth=2, num_heads=2), IMAGE, CLASS),
    "levit": Task(
        model("levit_128s", **SIZED, embed_dim=(16, 24), depth=(1, 1), num_heads=(2, 3), key_dim=8), IMAGE, CLASS
    ),
    "mvitv2": Task(lambda: MultiScaleVit(MVIT, 64, num_classes=4), IMAGE, CLASS),
    "convmixer": Task(lambda: ConvMixer(16, 2, num_classes=4), IMAGE, CLASS),
    "lcnet": Task(model("lcnet_035"), IMAGE, CLASS),
    "ghostnet": Task(model("ghostnet_050"), IMAGE, CLASS, noisy=True),  # its drop_rate is left as it is
    "mobilenetv3": Task(model("mobilenetv3_small_050"), IMAGE, CLASS),
    "poolformer": Task(lambda: MetaFormer(depths=(1, 1), dims=(8, 16), num_classes=4), IMAGE, CLASS),
    "mobilevit": Task(model("mobilevit_xxs"), IMAGE, CLASS),
    "edgenext": Task(model("edgenext_xx_small"), IMAGE, CLASS),
}
MODELS = {name: in_double(task) for name, task in MODELS.items()}
