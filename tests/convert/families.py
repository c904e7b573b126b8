"""The families of networks that people convert, one small member or more of each, with random weights.

torchvision with its detectors, segmenters and video networks, the families of timm, transformers from tiny
configurations, and segmentation-models-pytorch. Nothing is downloaded; a missing package skips its tests.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models import detection, optical_flow, segmentation, video

__all__ = ["FAMILIES", "TIMM", "Family"]


def images(side=64, n=2):
    return torch.randn(n, 3, side, side)


@dataclass(frozen=True)
class Family:
    """A network, and what to call it with."""

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]] = tuple
    kwargs: Callable[[], dict[str, Any]] = dict
    double: bool = False
    """Whether to compare in float64: where boxes are proposed and sorted, and roundings decide which."""
    tolerance: float = 3e-6
    """Of an output against the plain network's, relative to the largest value of its tensor."""


# torchvision


def classifiers():
    small = ("alexnet vgg11 vgg11_bn resnet18 resnext50_32x4d wide_resnet50_2 densenet121 squeezenet1_1 mobilenet_v2 "
             "mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 regnet_x_400mf regnet_y_400mf efficientnet_b0 "
             "efficientnet_v2_s convnext_tiny swin_t swin_v2_t")  # fmt: skip
    for name in small.split():
        yield name, Family(partial(models.get_model, name, weights=None, num_classes=10), lambda: (images(),))
    yield "googlenet", Family(partial(models.googlenet, weights=None, init_weights=False), lambda: (images(),))
    yield "inception_v3", Family(partial(models.inception_v3, weights=None, init_weights=False), lambda: (images(96),))
    yield "vit_b_16", Family(partial(models.vit_b_16, weights=None, image_size=32), lambda: (images(32),))
    yield "maxvit_t", Family(partial(models.maxvit_t, weights=None, num_classes=10), lambda: (images(224),))


def detectors():
    """Small images stay small, boxes few, and what an untrained head is unsure of is reported too."""
    plain = {"weights": None, "weights_backbone": None, "num_classes": 4}
    small = {"min_size": 64, "max_size": 96}
    two_stages = {**small, "box_score_thresh": 0.0, "rpn_post_nms_top_n_test": 20, "box_detections_per_img": 8}
    one_stage = {**small, "score_thresh": 0.0}
    options = {
        "fasterrcnn_resnet50_fpn": two_stages,
        "fasterrcnn_resnet50_fpn_v2": two_stages,
        "fasterrcnn_mobilenet_v3_large_320_fpn": two_stages,
        "maskrcnn_resnet50_fpn": two_stages,
        "keypointrcnn_resnet50_fpn": two_stages,
        "retinanet_resnet50_fpn": one_stage,
        "retinanet_resnet50_fpn_v2": one_stage,
        "fcos_resnet50_fpn": one_stage,
        "ssd300_vgg16": {"score_thresh": 0.0},
        "ssdlite320_mobilenet_v3_large": {"score_thresh": 0.0},
    }
    for name, given in options.items():
        make = partial(getattr(detection, name), **plain, **given)
        yield name, Family(make, lambda: (list(torch.rand(2, 3, 64, 64)),), double="rcnn" in name)


def two_frames():
    return {"image1": torch.rand(1, 3, 128, 128), "image2": torch.rand(1, 3, 128, 128), "num_flow_updates": 2}


def others():
    plain = {"weights": None, "weights_backbone": None, "num_classes": 4}
    for name in ("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield name, Family(partial(getattr(segmentation, name), **plain), lambda: (images(),))
    clips = {"r3d_18": (8, 32), "mc3_18": (8, 32), "r2plus1d_18": (8, 32), "s3d": (16, 224), "swin3d_t": (8, 64),
             "mvit_v1_b": (16, 224)}  # fmt: skip
    for name, (frames, side) in clips.items():
        shape = (1, 3, frames, side, side)
        yield name, Family(partial(getattr(video, name), weights=None), lambda shape=shape: (torch.randn(shape),))
    raft = partial(optical_flow.raft_small, weights=None)
    # A flow is eight times a difference of coordinates from 0 to 16: of 1.7 their last digit alone is 4.4e-6.
    yield "raft_small", Family(raft, kwargs=two_frames, tolerance=1e-5)


# timm: the module of a family, and members of it with what they need; the side of their images is 64 unless said


def timm_network(name, **options):
    timm = pytest.importorskip("timm", reason="needs timm, of the extra of that name")
    return timm.create_model(name, pretrained=False, num_classes=10, **options)


@dataclass(frozen=True)
class Member:
    name: str
    side: int = 64
    sized: bool = False
    """Whether it is built for one size of images."""
    options: dict[str, Any] = field(default_factory=dict)

    def family(self):
        options = {**self.options, **({"img_size": self.side} if self.sized else {})}
        return Family(partial(timm_network, self.name, **options), lambda: (images(self.side),))


def sized(name, side=64, **options):
    return Member(name, side, sized=True, options=options)


TIMM: dict[str, tuple[Member, ...]] = {
    "beit": (sized("beit_base_patch16_224", depth=2),),
    "byoanet": (Member("halonet_h1", 256), sized("botnet26t_256")),
    "byobnet": (sized("mobileone_s1"), sized("repvgg_a0")),
    "cait": (sized("cait_xxs24_224", depth=2),),
    "coat": (sized("coat_tiny"),),
    "convit": (sized("convit_tiny", depth=2),),
    "convmixer": (Member("convmixer_768_32"),),
    "convnext": (Member("convnext_atto"),),
    "cpubone": (Member("cpubone_nano"),),
    "crossvit": (Member("crossvit_tiny_240"),),
    "csatv2": (Member("csatv2"),),
    "cspnet": (Member("cs3darknet_focus_s"), Member("cspresnet50"), Member("darknet53")),
    "cspnext": (Member("cspnext_tiny"),),
    "davit": (Member("davit_tiny"),),
    "deepseek_vit": (sized("deepseek_vit_412m", 224, depth=2),),
    "deit": (sized("deit_tiny_patch16_224", depth=2),),
    "densenet": (Member("densenet121"),),
    "dla": (Member("dla34"),),
    "dpn": (Member("dpn48b"),),
    "edgenext": (Member("edgenext_xx_small"),),
    "efficientformer": (Member("efficientformer_l1", 224),),
    "efficientformer_v2": (sized("efficientformerv2_s0"),),
    "efficientnet": (Member("efficientnet_b0"), Member("mobilenetv2_050"), Member("mnasnet_small"),
                     Member("mixnet_s")),
    "efficientvim": (Member("efficientvim_m1"),),
    "efficientvit_mit": (Member("efficientvit_b0"),),
    "efficientvit_msra": (sized("efficientvit_m0"),),
    "eva": (sized("vit_tiny_patch16_dinov3_qkvb", depth=2),),
    "fasternet": (Member("fasternet_t0"),),
    "fastvit": (Member("fastvit_t8"),),
    "focalnet": (Member("focalnet_tiny_srf"),),
    "gcvit": (sized("gcvit_xxtiny"),),
    "gemma4_vit": (sized("gemma4_vit_167m_enc", 96, depth=2),),
    "ghostnet": (Member("ghostnet_050"), Member("ghostnetv2_100"), Member("ghostnetv3_100")),
    "hardcorenas": (Member("hardcorenas_a"),),
    "hgnet": (Member("hgnetv2_b0"), Member("hgnet_tiny")),
    "hiera": (sized("hiera_tiny_224"),),
    "hieradet_sam2": (Member("sam2_hiera_tiny"),),
    "hrnet": (Member("hrnet_w18_small"),),
    "iformer": (Member("iformer_t"),),
    "inception_next": (Member("inception_next_atto"),),
    "inception_resnet_v2": (Member("inception_resnet_v2", 96),),
    "inception_v3": (Member("inception_v3", 96),),
    "inception_v4": (Member("inception_v4", 96),),
    "lcnetv2": (Member("lcnetv2_small"),),
    "levit": (sized("levit_128s"),),
    "lowformer": (Member("lowformer_b0"),),
    "mambaout": (Member("mambaout_femto"),),
    "maxxvit": (sized("maxvit_pico_rw_256"),),
    "metaformer": (Member("poolformerv2_s12"),),
    "mlp_mixer": (sized("gmlp_ti16_224"), sized("mixer_s32_224"), sized("resmlp_12_224")),
    "mobilenetv3": (Member("lcnet_035"), Member("mobilenetv3_small_050")),
    "mobilenetv5": (Member("mobilenetv5_base"),),
    "mobilevit": (Member("mobilevit_xxs"),),
    "mvitv2": (sized("mvitv2_tiny"),),
    "naflexvit": (sized("naflexvit_base_patch16_parfac_gap", depth=2),),
    "nasnet": (Member("nasnetalarge"),),
    "nest": (sized("nest_tiny"),),
    "nextvit": (Member("nextvit_small"),),
    "nfnet": (Member("nf_regnet_b0"),),
    "pit": (sized("pit_ti_224"),),
    "pnasnet": (Member("pnasnet5large"),),
    "pvt_v2": (Member("pvt_v2_b0"),),
    "qwen3_vit": (sized("qwen3_vit_88m", depth=2),),
    "rdnet": (Member("rdnet_tiny"),),
    "regnet": (Member("regnetx_002"), Member("regnety_002")),
    "repghost": (Member("repghostnet_050"),),
    "repvit": (Member("repvit_m1"),),
    "res2net": (Member("res2net50_26w_4s"),),
    "resnest": (Member("resnest14d"),),
    "resnet": (Member("resnet18"), Member("resnext50_32x4d"), Member("ecaresnet26t")),
    "resnetv2": (Member("resnetv2_18"), Member("resnetv2_50")),
    "rexnet": (Member("rexnet_100"),),
    "selecsls": (Member("selecsls42b"),),
    "senet": (Member("legacy_seresnet18"),),
    "sequencer": (sized("sequencer2d_s"),),
    "shvit": (Member("shvit_s1"),),
    "sknet": (Member("skresnet18"),),
    "starnet": (Member("starnet_s050"),),
    "swiftformer": (sized("swiftformer_xs"),),
    "swin_transformer": (sized("swin_tiny_patch4_window7_224"),),
    "swin_transformer_v2": (sized("swinv2_tiny_window16_256"),),
    "swin_transformer_v2_cr": (sized("swinv2_cr_tiny_224"),),
    "tiny_vit": (Member("tiny_vit_5m_224"),),
    "tnt": (sized("tnt_s_legacy_patch16_224", depth=2),),
    "tresnet": (Member("tresnet_m"),),
    "twins": (sized("twins_svt_small"),),
    "vgg": (Member("vgg11_bn"),),
    "visformer": (sized("visformer_tiny"),),
    "vision_transformer": (sized("vit_tiny_patch16_224", depth=2),),
    "vision_transformer_hybrid": (sized("vit_tiny_r_s16_p8_224"),),
    "vision_transformer_relpos": (sized("vit_srelpos_small_patch16_224", depth=2),),
    "vision_transformer_sam": (sized("samvit_base_patch16_224", depth=2),),
    "vitamin": (sized("vitamin_small_224"),),
    "volo": (sized("volo_d1_224"),),
    "vovnet": (Member("ese_vovnet19b_slim_dw"), Member("vovnet39a")),
    "xception": (Member("legacy_xception"),),
    "xception_aligned": (Member("xception41p"),),
    "xcit": (sized("xcit_nano_12_p8_224", depth=2),),
}  # fmt: skip


# transformers: tiny configurations; with ReLU where the family may have it


def transformer(config, head="AutoModel", **options):
    transformers = pytest.importorskip("transformers", reason="needs transformers; pip install transformers")
    made = {name: value(transformers) if callable(value) else value for name, value in options.items()}
    configuration = getattr(transformers, config)(**made)
    if head == "AutoModel":
        return transformers.AutoModel.from_config(configuration)
    return getattr(transformers, head)(configuration)


def tokens(n=9):
    return torch.randint(5, 90, (2, n))


def text():
    return {"input_ids": tokens()}


def texts():
    return {"input_ids": tokens(), "decoder_input_ids": tokens(7)}


def pixels(side=64):
    return {"pixel_values": images(side)}


def speech(*shape):
    return {"input_features": torch.randn(shape), "decoder_input_ids": tokens(7)}


def time_series():
    values = {"past_values": (2, 15), "past_time_features": (2, 15, 1), "future_values": (2, 4),
              "future_time_features": (2, 4, 1)}  # fmt: skip
    return {"past_observed_mask": torch.ones(2, 15), **{name: torch.rand(shape) for name, shape in values.items()}}


VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
BERT = {**VISION, "vocab_size": 99}
LAYERS = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
          "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
BART = {**LAYERS, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
RESNET = {**STAGES, "embedding_size": 16, "layer_type": "basic"}
TRANSFORMERS = {
    "Bert": (text, {**BERT, "hidden_act": "relu"}),
    "Roberta": (text, BERT),
    "DistilBert": (text, {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64,
                          "activation": "relu"}),
    "Electra": (text, {**BERT, "embedding_size": 16}),
    "Albert": (text, {**BERT, "embedding_size": 16, "hidden_act": "relu"}),
    "DebertaV2": (text, BERT),
    "MobileBert": (text, {**BERT, "embedding_size": 16, "intra_bottleneck_size": 32}),
    "GPT2": (text, {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "OPT": (text, {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64,
                   "num_attention_heads": 4, "word_embed_proj_dim": 32}),
    "Llama": (text, BERT),
    "Bloom": (text, {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "T5": (texts, T5),
    "MT5": (texts, T5),
    "Bart": (texts, {**BART, "vocab_size": 99}),
    "M2M100": (texts, {**BART, "vocab_size": 99}),
    "Pegasus": (texts, {**BART, "vocab_size": 99, "activation_function": "relu"}),
    "FSMT": (texts, {**BART, "langs": ["en", "de"], "src_vocab_size": 99, "tgt_vocab_size": 99}),
    "Speech2Text": (partial(speech, 2, 40, 8), {**BART, "vocab_size": 99, "input_feat_per_channel": 8,
                                                "input_channels": 1, "conv_channels": 16}),
    "Whisper": (partial(speech, 2, 8, 40), {**BART, "vocab_size": 99, "num_mel_bins": 8, "max_source_positions": 20}),
    "Wav2Vec2": (lambda: {"input_values": torch.randn(2, 400)},
                 {**BERT, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
                  "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}),
    "ViT": (partial(pixels, 32), {**VISION, "image_size": 32, "patch_size": 8}),
    "CLIPVision": (partial(pixels, 32), {**VISION, "image_size": 32, "patch_size": 8}),
    "Swin": (partial(pixels, 32), {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1],
                                   "num_heads": [2, 2], "window_size": 4}),
    "Segformer": (pixels, {**STAGES, "num_encoder_blocks": 2, "sr_ratios": [4, 2], "num_attention_heads": [1, 2],
                           "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
                           "head": "SegformerForSemanticSegmentation"}),
    "ResNet": (pixels, RESNET),
    "RegNet": (pixels, {**STAGES, "embedding_size": 16, "groups_width": 8}),
    "ConvNext": (pixels, {**STAGES, "num_stages": 2}),
    "MobileNetV1": (pixels, {"image_size": 64, "depth_multiplier": 0.25, "min_depth": 8, "hidden_act": "relu"}),
    "MobileNetV2": (pixels, {"image_size": 64, "depth_multiplier": 0.25}),
    "EfficientNet": (pixels, {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25,
                              "hidden_dim": 320}),
    "Levit": (pixels, {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 3],
                       "depths": [1, 1, 1], "key_dim": [8, 8, 8],
                       "down_ops": [["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 3, 2, 2, 2]]}),
    "PoolFormer": (pixels, {**STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
                            "padding": [2, 1], "hidden_act": "relu"}),
    "DPT": (partial(pixels, 32), {**VISION, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8,
                                  "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 16, 16],
                                  "fusion_hidden_size": 16, "head": "DPTForDepthEstimation"}),
    "Detr": (pixels, {**LAYERS, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
                      "backbone_config": lambda library: library.ResNetConfig(**RESNET, out_features=["stage2"]),
                      "num_queries": 5, "head": "DetrForObjectDetection"}),
    "TimeSeriesTransformer": (time_series, {**LAYERS, "prediction_length": 4, "context_length": 8,
                                            "activation_function": "relu", "num_time_features": 1}),
}  # fmt: skip


# segmentation-models-pytorch


def segmenter(name, **options):
    library = pytest.importorskip(
        "segmentation_models_pytorch",
        reason="needs segmentation-models-pytorch; pip install segmentation-models-pytorch",
    )
    return getattr(library, name)(encoder_weights=None, classes=3, **{"encoder_name": "resnet18", **options})


def segmenters():
    names = "Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus UPerNet Segformer"
    for name in names.split():
        yield name, Family(partial(segmenter, name), lambda: (images(),))
    yield "PAN", Family(partial(segmenter, "PAN"), lambda: (images(128),))
    dpt = partial(segmenter, "DPT", encoder_name="tu-vit_tiny_patch16_224", dynamic_img_size=True)
    yield "DPT", Family(dpt, lambda: (images(),))


FAMILIES = {
    **{f"torchvision:{name}": family for part in (classifiers, detectors, others) for name, family in part()},
    **{f"timm:{member.name}": member.family() for members in TIMM.values() for member in members},
    **{f"transformers:{name}": Family(partial(transformer, f"{name}Config", **options), kwargs=inputs)
       for name, (inputs, options) in TRANSFORMERS.items()},
    **{f"smp:{name}": family for name, family in segmenters()},
}  # fmt: skip
