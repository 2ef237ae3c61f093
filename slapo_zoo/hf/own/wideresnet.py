"""Wide residual networks as a `transformers` model, with torchvision's names for every tensor.

Source: Zagoruyko & Komodakis 2016, Wide Residual Networks, arXiv:1605.07146; the bottleneck with
its stride on the 3x3 convolution, as in torchvision's wide_resnet50_2.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.utils.generic import can_return_tuple

__all__ = [
    "WideResNetConfig",
    "WideResNetForImageClassification",
    "WideResNetModel",
    "WideResNetPreTrainedModel",
]

EXPANSION = 4  # output channels of a block per plane
# name -> (blocks of the four stages, width_per_group); the paper's model is the deep one.
SIZES = {
    "wide_resnet50_2": ((3, 4, 6, 3), 128),  # 68.9 M
    "wide_resnet101_2": ((3, 4, 23, 3), 128),  # 126.9 M
    "wideresnet-250M": ((6, 8, 46, 6), 128),
    "wideresnet-1.3B": ((6, 8, 46, 6), 320),
    "wideresnet-2.6B": ((6, 8, 46, 6), 472),
}


class WideResNetConfig(PretrainedConfig):
    """Config of a wide residual network; `WideResNetConfig.named("wide_resnet50_2")` gives that of torchvision.

    Args:
        num_channels: channels of the image.
        depths: number of bottleneck blocks of each stage.
        stem_channels: channels of the stem, and planes of the first stage; they double per stage.
        width_per_group: inner channels of a block per 64 planes: 128 is "twice as wide".
        small_images: use a 3x3 stem that keeps the resolution, for images of a few dozen pixels.
        channels_last: run in channels-last memory format, which is faster for convolutions.
        batch_norm_eps: epsilon of every BatchNorm.
        batch_norm_momentum: momentum of every BatchNorm.
        kwargs: arguments of every config, e.g. num_labels.
    """

    model_type = "wideresnet"

    def __init__(
        self,
        num_channels: int = 3,
        depths: tuple[int, ...] = (3, 4, 6, 3),
        stem_channels: int = 64,
        width_per_group: int = 128,
        small_images: bool = False,
        channels_last: bool = True,
        batch_norm_eps: float = 1e-5,
        batch_norm_momentum: float = 0.1,
        **kwargs: Any,
    ):
        self.num_channels, self.depths, self.stem_channels = (
            num_channels,
            list(depths),
            stem_channels,
        )
        self.width_per_group, self.small_images = width_per_group, small_images
        self.channels_last = channels_last
        self.batch_norm_eps, self.batch_norm_momentum = batch_norm_eps, batch_norm_momentum
        super().__init__(**kwargs)

    @classmethod
    def named(cls, name: str, **changes: Any) -> "WideResNetConfig":
        """Return the config of the size with that name in SIZES, e.g. "wide_resnet50_2"; `changes` are other fields."""
        depths, width = SIZES[name]
        return cls(**{"depths": depths, "width_per_group": width, "num_labels": 1000, **changes})


def _batch_norm(channels: int, config: WideResNetConfig) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, config.batch_norm_eps, config.batch_norm_momentum)


class WideResNetBottleneck(nn.Module):
    """Residual block of three convolutions with BatchNorm: relu(x' + f(x)), x' is x or a 1x1 convolution of x."""

    def __init__(self, config: WideResNetConfig, channels: int, planes: int, stride: int):
        super().__init__()
        width, out = planes * config.width_per_group // 64, planes * EXPANSION
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = _batch_norm(width, config)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = _batch_norm(width, config)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = _batch_norm(out, config)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, _batch_norm(out, config))
        self.format = torch.channels_last if config.channels_last else torch.contiguous_format

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output [B, 4 * planes, H / stride, W / stride] for x [B, C, H, W]."""
        x = x.contiguous(memory_format=self.format)  # received tensors are contiguous
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class WideResNetPreTrainedModel(PreTrainedModel):
    """Base class of WideResNet models; weights are initialised as in torchvision."""

    config_class = WideResNetConfig
    main_input_name = "pixel_values"
    input_modalities = "image"
    supports_gradient_checkpointing = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):
            init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)


class WideResNetModel(WideResNetPreTrainedModel):
    """WideResNet without its classifier: features and their mean over the pixels."""

    def __init__(self, config: WideResNetConfig):
        super().__init__(config)
        stem = (3, 1, 1) if config.small_images else (7, 2, 3)
        self.conv1 = nn.Conv2d(config.num_channels, config.stem_channels, *stem, bias=False)
        self.bn1 = _batch_norm(config.stem_channels, config)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if config.small_images else nn.MaxPool2d(3, 2, padding=1)
        channels, self.stages = config.stem_channels, []
        for i, depth in enumerate(config.depths):
            planes, blocks = config.stem_channels << i, []
            for j in range(depth):
                stride = 2 if i > 0 and j == 0 else 1
                blocks.append(WideResNetBottleneck(config, channels, planes, stride))
                channels = planes * EXPANSION
            self.stages.append(f"layer{i + 1}")
            self.add_module(self.stages[-1], nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.num_features = channels
        if type(self) is WideResNetModel:
            self.post_init()

    def features(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the last block's output for pixels [B, C, H, W], its mean over the pixels [B, num_features])."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(pixel_values))))
        for name in self.stages:
            x = self.get_submodule(name)(x)
        return x, self.avgpool(x).flatten(1)

    @can_return_tuple
    def forward(self, pixel_values: Tensor, **kwargs: Any) -> Any:
        """Return a model output: the last block's output as `last_hidden_state`, its pixel mean as `pooler_output`."""
        hidden, pooled = self.features(pixel_values)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=hidden, pooler_output=pooled
        )


class WideResNetForImageClassification(WideResNetModel):
    """WideResNet with its linear classifier, as in the paper."""

    def __init__(self, config: WideResNetConfig):
        super().__init__(config)
        self.fc = nn.Linear(self.num_features, config.num_labels or 0)
        self.post_init()

    @can_return_tuple
    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """Return a model output with `logits` [B, num_labels] and `loss`, which is None without labels [B]."""
        logits = self.fc(self.features(pixel_values)[1])
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


AutoConfig.register("wideresnet", WideResNetConfig)
AutoModel.register(WideResNetConfig, WideResNetModel)
AutoModelForImageClassification.register(WideResNetConfig, WideResNetForImageClassification)
